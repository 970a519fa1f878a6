"""Storage of checkpoints: a folder of the file system, or a URL of any store that fsspec supports.

Both make a checkpoint visible atomically, once it is complete: a folder by renaming; a store without renaming by
writing ``state.json`` last. This file imports no torch, as the background writers use it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias

from stoker.files import flush_folder, free_name, open_regular, replace_file, write_all

if TYPE_CHECKING:
    from stoker.checkpoint.remote import RemoteStorage

STATE = "state.json"
OWNER = "run.json"  # which run the checkpoints of a place belong to; see `stoker.checkpoint.owner`
METADATA = ".metadata"  # index of the tensors and their places in the files, as torch.distributed.checkpoint reads it
NAME = re.compile(r"step-(\d{8})")
ATTEMPT = re.compile(r"step-(\d{8})-([a-zA-Z0-9]+)\.(\d+)\.(\d+)")  # step, machine, process, when
POLL = 0.1  # seconds
CLOCK = 5.0  # seconds by which the start of a process may be inexact, with small adjustments of the clock
BASE = "base"  # the key of the step that a checkpoint adds to, in ``state.json``
SUM = "sha256"  # the key of the checksum of ``state.json``
WITHOUT_SUM = {"step", "progress", "scaler", "files"}  # keys of a file from before checksums
Storage: TypeAlias = "LocalStorage | RemoteStorage"


def storage_of(place: Path | str) -> Storage:
    """Returns the storage at a folder or a URL.

    Raises:
        UserError: no library for such a URL is installed.
    """
    if isinstance(place, Path):
        return LocalStorage(place)
    from stoker.checkpoint.remote import RemoteStorage

    return RemoteStorage(place)


def name_of(step: int) -> str:
    """Returns the name of a complete checkpoint."""
    return f"step-{step:08d}"


def attempt_name(step: int, maker: int) -> str:
    """Returns a unique name for an attempt that the process ``maker`` of this machine will finish."""
    return f"{name_of(step)}-{_machine()}.{maker}.{time.time_ns()}"


def step_of(attempt: str) -> int:
    """Returns the step of an attempt."""
    return int(attempt.split("-")[1])


def _machine() -> str:
    return re.sub(r"[^a-zA-Z0-9]", "", socket.gethostname()) or "host"


def is_alive(attempt: str) -> bool:
    """Returns whether another process of this machine, named in the attempt, is still writing it.

    A thread, or a process that started later, has only got the same number.
    """
    import psutil  # imported here, as the writers do not need it and must start fast

    match = ATTEMPT.fullmatch(attempt)
    if match is None or match[2] != _machine() or int(match[3]) == os.getpid():
        return False
    try:
        maker = psutil.Process(int(match[3]))
        is_older = maker.create_time() < int(match[4]) / 1e9 + CLOCK
        return is_older and psutil.pid_exists(maker.pid) and maker.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@dataclass(frozen=True)
class LocalStorage:
    """Storage in a folder. An attempt is an incomplete checkpoint: a hidden folder, which is renamed.

    `RemoteStorage` has the same methods. Errors of the place are OSErrors.
    """

    place: Path

    def steps(self) -> list[int]:
        """Returns the steps with a complete checkpoint, ascending."""
        if not self.place.is_dir():
            return []
        matches = (NAME.fullmatch(path.name) for path in self.place.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def path(self, step: int) -> Path:
        """Returns the path of a complete checkpoint, for torch.distributed.checkpoint."""
        return self.place / name_of(step)

    def begin(self, step: int, maker: int) -> str | None:
        """Begins an attempt that the process ``maker`` of this machine will finish; None if the step is saved."""
        if self.path(step).exists():
            return None
        attempt = attempt_name(step, maker)
        self._attempt(attempt).mkdir(parents=True)
        return attempt

    @contextmanager
    def create(self, attempt: str, name: str) -> Iterator[IO[bytes]]:
        """Opens a new file of an attempt, which is synced to disk on exit."""
        with (self._attempt(attempt) / name).open("wb", buffering=0) as file:
            yield file
            os.fsync(file.fileno())

    def names(self, attempt: str) -> set[str]:
        """Returns the names of an attempt's files so far, as all machines see them."""
        return {path.name for path in self._attempt(attempt).iterdir()}

    def read(self, attempt: str, name: str) -> bytes:
        """Reads a file of an attempt."""
        return (self._attempt(attempt) / name).read_bytes()

    def remove(self, attempt: str, name: str) -> None:
        """Deletes a file of an attempt."""
        (self._attempt(attempt) / name).unlink()

    def commit(self, attempt: str, state: bytes) -> None:
        """Adds ``state.json`` and makes the checkpoint visible."""
        with self.create(attempt, STATE) as file:
            write_all(file, state)
        flush_folder(self._attempt(attempt))
        self._attempt(attempt).rename(self.path(step_of(attempt)))
        flush_folder(self.place)

    def give_up(self, attempt: str) -> None:
        """Deletes an attempt."""
        shutil.rmtree(self._attempt(attempt), ignore_errors=True)

    def sizes(self, step: int) -> dict[str, int]:
        """Returns the bytes of each file of a checkpoint but ``state.json``."""
        files = sorted(self.path(step).iterdir())
        return {path.name: path.stat().st_size for path in files if path.name != STATE}

    def open(self, step: int, name: str) -> IO[bytes]:
        """Opens a file of a checkpoint."""
        return open(self.path(step) / name, "rb", opener=open_regular)

    def room(self) -> int | None:
        """Returns the free bytes; None if they are unknown."""
        there = next(path for path in (self.place, *self.place.absolute().parents) if path.is_dir())
        system = os.statvfs(there)
        return system.f_bavail * system.f_frsize if system.f_blocks else None

    def put_aside(self, step: int) -> str:
        """Renames a checkpoint, so that it is not listed; returns the path of its files."""
        aside = self.place / f"damaged-{self.path(step).name}"
        shutil.rmtree(aside, ignore_errors=True)
        return str(self.path(step).rename(aside))

    def put_all_aside(self, name: str) -> str:
        """Moves all checkpoints and the owner into the first free folder ``name.1``, ``name.2`` ...; returns it."""
        self.clean()
        name = free_name(name, lambda one: (self.place / one).exists())
        (self.place / name).mkdir()
        for path in (self.place / OWNER, *self.place.glob("*step-*")):
            if path.name == OWNER or NAME.fullmatch(path.name.removeprefix("damaged-")):
                with suppress(FileNotFoundError):
                    path.rename(self.place / name / path.name)
        return name

    def owner(self) -> bytes | None:
        """Returns the contents of the file that names the run of these checkpoints; None without one."""
        try:
            with open(self.place / OWNER, "rb", opener=open_regular) as file:
                return file.read()
        except FileNotFoundError:
            return None

    def claim(self, owner: bytes, *, replaces: bool) -> None:
        """Writes that file.

        Raises:
            FileExistsError: it exists, and ``replaces`` is False.
        """
        self.place.mkdir(parents=True, exist_ok=True)
        if replaces:
            replace_file(self.place / OWNER, owner)
        else:
            with (self.place / OWNER).open("xb") as file:
                file.write(owner)

    def delete(self, step: int) -> None:
        """Deletes a checkpoint; a half-deleted one is never visible."""
        doomed = self.place / f".doomed-{self.path(step).name}-{os.getpid()}"
        self.path(step).rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    def clean(self) -> None:
        """Deletes the leftovers of ended processes."""
        for attempt in self._attempts():
            if not is_alive(attempt):
                self.give_up(attempt)
        for path in self.place.glob(".doomed-step-*"):
            shutil.rmtree(path, ignore_errors=True)

    def pending(self) -> list[int]:
        """Returns the steps that another process of this machine is still writing."""
        return [step_of(attempt) for attempt in self._attempts() if is_alive(attempt)]

    def attempts_after(self, step: int) -> list[str]:
        """Returns the attempts at later steps, by any process."""
        return [attempt for attempt in self._attempts() if step_of(attempt) > step]

    def _attempts(self) -> list[str]:
        return [path.name.removeprefix(".partial-") for path in self.place.glob(".partial-step-*")]

    def _attempt(self, attempt: str) -> Path:
        return self.place / f".partial-{attempt}"


def write_state(values: Mapping[str, Any]) -> bytes:
    """Returns the contents of ``state.json``, including a checksum."""
    plain = json.loads(json.dumps(values))
    return json.dumps({**plain, SUM: _sum(plain)}).encode()


def read_state(storage: Storage, step: int) -> dict[str, Any]:
    """Reads ``state.json`` of a checkpoint, without its checksum.

    Raises:
        ValueError: it has changed since it was written, or it is of another step.
    """
    with storage.open(step, STATE) as file:
        values: dict[str, Any] = json.loads(file.read())
    written = values.pop(SUM, None)
    if written != _sum(values) and not (written is None and values.keys() == WITHOUT_SUM):
        raise ValueError(f"{STATE} has other contents than were written")
    if values["step"] != step:
        raise ValueError(f"{STATE} is of step {values['step']}")
    return values


def base_of(storage: Storage, step: int) -> int | None:
    """Returns the step of the checkpoint that this one adds to; None if it is full, or damaged."""
    try:
        base: int | None = read_state(storage, step).get(BASE)
    except (FileNotFoundError, ValueError, KeyError):
        return None
    return base


def _sum(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
