"""Finds the process that trains in a run's folder, by its lock."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from stoker.job.run_records import LOCK
from stoker.runs.run_folder import RunFolder

LOCKS = Path("/proc/locks")


def holder_of(folder: RunFolder) -> psutil.Process | None:
    """Returns the process that holds a run's lock on this machine; None if none does, or it cannot be found."""
    path = folder.path / LOCK
    if not path.is_file() or not folder.is_taken():
        return None
    number = _by_lock(path) or _by_open_file(path)
    try:
        return psutil.Process(number) if number is not None else None
    except psutil.Error:
        return None


def ask_to_stop(process: psutil.Process) -> bool:
    """Sends SIGTERM to a process, which may just have ended; returns False if it is another user's."""
    try:
        process.terminate()
    except psutil.NoSuchProcess:
        pass
    except psutil.AccessDenied:
        return False
    return True


def _by_lock(path: Path) -> int | None:
    """Finds the process in the kernel's table: ``1: FLOCK  ADVISORY  WRITE 4711 fe:01:131205 0 EOF``."""
    found = path.stat()
    wanted = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    try:
        lines = LOCKS.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        words = line.split()
        if len(words) >= 6 and words[1] == "FLOCK" and words[5] == wanted and words[4].isdecimal():
            return int(words[4])
    return None


def _by_open_file(path: Path) -> int | None:
    """Finds this user's process that has the file open, if there is no such table, or it names another device."""
    real = str(path.resolve())
    for process in psutil.process_iter():
        try:
            if any(each.path == real for each in process.open_files()):
                return int(process.pid)
        except (psutil.Error, OSError):
            continue
    return None
