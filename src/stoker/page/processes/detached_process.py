"""Processes that outlive the page: each has a folder by which it is found again.

process.json   its command line, folder and environment
pid.json       its number and when it was created, so that another process of that number is not taken for it
watcher.json   the same of its parent, which writes down its end
out, err       its output
ended.json     its exit code, and when it ended

`python -m stoker.page.processes.detached_process FOLDER` is its parent: it starts the process in a separate session
and waits.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from stoker.files import open_regular, read_file, replace_file

State = Literal["waiting", "starting", "running", "ended", "lost"]
STARTING = 30.0  # seconds within which a process has a number
FILE = "process.json"
# Exit codes after a signal: without a handler, and with one.
STOPPED = {code for number in (signal.SIGINT, signal.SIGTERM) for code in (-number, 128 + number)}
WATCHER = "watcher.json"


@dataclass(frozen=True)
class DetachedProcess:
    """A process that outlives the page, by its folder."""

    folder: Path

    def prepare(self, arguments: Sequence[str], *, cwd: Path, env: Mapping[str, str] | None = None) -> None:
        """Writes the process' description to its folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        values = {"arguments": list(arguments), "cwd": str(cwd), "env": dict(env or {})}
        replace_file(self.folder / FILE, json.dumps(values))

    def start(self, env: Mapping[str, str] | None = None) -> None:
        """Starts the prepared process, which outlives this one in any case.

        Args:
            env: further variables.
        """
        replace_file(self.folder / "begun.json", json.dumps({"time": time.time()}))
        spawn(["-m", "stoker.page.processes.detached_process", str(self.folder)], env={**os.environ, **(env or {})})

    @property
    def state(self) -> State:
        """The state of the process. ``lost``: its end was not recorded, as after a power failure."""
        if self.code is not None:
            return "ended"
        begun = _read(self.folder / "begun.json")
        if not begun:
            return "waiting"
        if self.process is not None:
            return "running"
        is_begun = (self.folder / "pid.json").exists()
        if process_at(self.folder / WATCHER) is not None:  # it writes down the end, or is about to start the process
            return "running" if is_begun else "starting"
        if not is_begun and time.time() - float(begun.get("time", 0)) < STARTING:
            return "starting"
        return "ended" if self.code is not None else "lost"

    @property
    def code(self) -> int | None:
        """Exit code of the process; None while it runs."""
        found = _read(self.folder / "ended.json").get("code")
        return found if isinstance(found, int) else None

    @property
    def was_stopped(self) -> bool:
        """Whether it ended because it was asked to: by SIGINT or SIGTERM."""
        return self.code in STOPPED

    @property
    def cwd(self) -> Path:
        """The folder that the process is started in."""
        return Path(str(_read(self.folder / FILE)["cwd"]))

    @property
    def process(self) -> psutil.Process | None:
        """The process, while it lives."""
        return process_at(self.folder / "pid.json")

    def times(self) -> tuple[float | None, float | None]:
        """Returns the times of its start and its end, seconds since 1970."""
        return _read(self.folder / "begun.json").get("time"), _read(self.folder / "ended.json").get("time")

    def stop(self, number: int = signal.SIGTERM) -> bool:
        """Sends it a signal; returns whether it lived."""
        process = self.process
        if process is None:
            return False
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)
        return True

    def output(self, name: Literal["out", "err"], *, offset: int = 0, most: int = 1 << 20) -> tuple[str, int]:
        """Returns its output from a byte offset on, and the next offset; the end of it if ``offset`` is below 0."""
        try:
            with open(self.folder / name, "rb", opener=open_regular) as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(0, size - most) if offset < 0 else min(offset, size))
                content = file.read(most)
                return content.decode("utf-8", "replace"), file.tell()
        except OSError:
            return "", 0


def spawn(arguments: Sequence[str], env: Mapping[str, str] | None = None) -> None:
    """Starts Python with some arguments in a separate session; a thread waits for its end."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    threading.Thread(target=process.wait, daemon=True).start()


def write_process(path: Path, process: psutil.Process) -> None:
    """Writes down a process, so that another one of its number is not taken for it."""
    replace_file(path, json.dumps({"pid": process.pid, "created": process.create_time()}))


def process_at(path: Path) -> psutil.Process | None:
    """Returns the process that was written down, while it lives."""
    found = _read(path)
    try:
        process = psutil.Process(int(found["pid"]))
        is_it = abs(process.create_time() - float(found["created"])) < 1.0
        return process if is_it and process.status() != psutil.STATUS_ZOMBIE else None
    except (psutil.Error, KeyError, ValueError, TypeError):
        return None


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_file(path))
        return found if isinstance(found, dict) else {}
    except (OSError, ValueError):
        return {}


def _parent(folder: Path) -> int:
    """Starts the process of a folder and waits for it."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # a handler, unlike SIG_IGN, is not inherited by the process
    write_process(folder / WATCHER, psutil.Process())
    values = _read(folder / FILE)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
    out, err = (os.open(folder / name, flags, 0o600) for name in ("out", "err"))
    try:
        process = subprocess.Popen(
            values["arguments"],
            cwd=values["cwd"],
            env={**os.environ, **values["env"]},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        write_process(folder / "pid.json", psutil.Process(process.pid))
        code = process.wait()
    except (OSError, psutil.Error) as error:
        os.write(err, f"error: it cannot be started: {error}\n".encode())
        code = 127
    replace_file(folder / "ended.json", json.dumps({"code": code, "time": time.time()}))
    return 0


if __name__ == "__main__":
    sys.exit(_parent(Path(sys.argv[1])))
