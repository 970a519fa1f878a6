"""Writing of a process' part of a checkpoint, and the commit once all parts are written.

``python -m stoker.checkpoint.writer`` is the background process for it: it reads requests from standard input, a line
of JSON each, and answers in the same way. It imports no torch, so it starts fast and takes little memory. At the end of
its standard input it finishes the current write, removes the folders given as arguments, and exits.
"""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stoker.checkpoint.dcp_file_layout import DcpFileLayout, DcpFilePart
from stoker.checkpoint.retention import Keep, retain
from stoker.checkpoint.storage import METADATA, POLL, Storage, storage_of, write_state
from stoker.errors import RunFailed
from stoker.files import has_input, write_all

ORPHANED = 30.0  # seconds that other processes' parts get to arrive after this one's process has ended
GIVE_UP = b"give up"  # a line that cancels the pending checkpoint
NICE = 5  # lets training run first where cores are scarce


@dataclass(frozen=True)
class Written:
    """Name, size and checksum of a written checkpoint file."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class WriteRequest:
    """Request to write a part of a checkpoint from shared memory.

    Attributes:
        place: folder or URL of the checkpoints.
        attempt: name from `Storage.begin`.
        data, file_layout: files with the tensors' bytes, and with the bytes around them (`DcpFileLayout`).
        metadata: the file with the whole checkpoint's metadata; empty but on rank 0, which commits.
        numbers: contents of ``state.json`` beside the files.
    """

    place: str
    attempt: str
    step: int
    rank: int
    world: int
    data: str
    file_layout: str
    metadata: str
    numbers: dict[str, Any]
    keep: Keep

    @classmethod
    def of(cls, line: bytes) -> WriteRequest:
        values = json.loads(line)
        return cls(**{**values, "keep": Keep(**values["keep"])})

    @property
    def storage(self) -> Storage:
        return storage_of(self.place if "://" in self.place else Path(self.place))


def write_part(
    storage: Storage, attempt: str, file_layout: DcpFileLayout, data: Callable[[DcpFilePart], memoryview]
) -> Written:
    """Writes a process' file of an attempt to disk."""
    with storage.create(attempt, file_layout.name) as file:
        sha256 = file_layout.write(file, data)
    return Written(file_layout.name, file_layout.size, sha256)


def commit(
    storage: Storage, attempt: str, *, step: int, parts: Sequence[Written], metadata: bytes, numbers: Mapping[str, Any]
) -> int:
    """Makes a checkpoint visible after its parts have been written; returns its bytes, 0 if another attempt was
    faster.

    Raises:
        RunFailed: a part is not visible from here.
    """
    state = {"step": step, **numbers}
    if lost := {part.name for part in parts} - storage.names(attempt):
        raise RunFailed(
            f"{min(lost)} was written on another machine and cannot be seen on this one: "
            "checkpoint.to must be a folder that all machines share"
        )
    with storage.create(attempt, METADATA) as file:
        write_all(file, metadata)
    files = [*parts, Written(METADATA, len(metadata), hashlib.sha256(metadata).hexdigest())]
    state["files"] = {file.name: {"bytes": file.bytes, "sha256": file.sha256} for file in files}
    try:
        storage.commit(attempt, write_state(state))
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        storage.give_up(attempt)
        return 0
    return sum(file.bytes for file in files)


class Writer:
    """The background process."""

    def __init__(self) -> None:
        self._rest = b""
        self._lines: list[bytes] = []
        self._ended = False

    def run(self) -> None:
        """Serves requests until the input ends."""
        while (line := self._next()) is not None:
            if line == GIVE_UP:  # that checkpoint has ended already
                continue
            request = WriteRequest.of(line)
            try:
                self._serve(request)
            except Exception as error:
                self._say(step=request.step, error=str(error), errno=error.errno if isinstance(error, OSError) else 0)

    def _serve(self, request: WriteRequest) -> None:
        storage, attempt = request.storage, request.attempt
        metadata = Path(request.metadata).read_bytes() if request.metadata else b""
        try:
            written = write_part(
                storage, attempt, DcpFileLayout.read(Path(request.file_layout)), _staged(Path(request.data))
            )
            with storage.create(attempt, f"done-{request.rank}.json") as file:
                write_all(file, json.dumps(asdict(written)).encode())
        except Exception:
            if request.rank == 0:
                storage.give_up(attempt)
            raise
        self._say(step=request.step, written=written.bytes)
        if request.rank == 0:
            try:
                self._commit(storage, request, metadata)
            except BaseException:
                storage.give_up(attempt)
                raise

    def _commit(self, storage: Storage, request: WriteRequest, metadata: bytes) -> None:
        missing = {f"done-{rank}.json" for rank in range(request.world)}
        parts: list[Written] = []
        since = time.monotonic()
        while True:
            for name in missing & storage.names(request.attempt):
                with suppress(ValueError):  # it exists, but its contents are not visible yet
                    parts.append(Written(**json.loads(storage.read(request.attempt, name))))
                    missing.discard(name)
                    storage.remove(request.attempt, name)
            if not missing:
                break
            if self._asked_to_give_up():
                raise RunFailed("another process could not write its part")
            if self._ended and time.monotonic() - since > ORPHANED:
                raise RunFailed("another process has not written its part")
            time.sleep(POLL)
        size = commit(
            storage, request.attempt, step=request.step, parts=parts, metadata=metadata, numbers=request.numbers
        )
        self._say(step=request.step, committed=size)
        with suppress(OSError):  # files that could not be deleted are deleted after the next checkpoint
            retain(storage, request.keep)
        self._say(step=request.step, retained=True)

    # -- lines in and out ------------------------------------------------------------------------------------

    def _next(self) -> bytes | None:
        while not self._lines and not self._ended:
            self._read(None)
        return self._lines.pop(0) if self._lines else None

    def _asked_to_give_up(self) -> bool:
        self._read(0.0)
        if self._lines[:1] != [GIVE_UP]:
            return False
        self._lines.pop(0)
        return True

    def _read(self, timeout: float | None) -> None:
        if self._ended or not has_input(0, timeout):
            return
        data = os.read(0, 1 << 20)
        self._ended = not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._lines += lines

    @staticmethod
    def _say(**values: Any) -> None:
        with suppress(BrokenPipeError):  # the requesting process has ended
            os.write(1, json.dumps({"at": time.time(), **values}).encode() + b"\n")


def _staged(path: Path) -> Callable[[DcpFilePart], memoryview]:
    """Returns a function that finds tensors in a copy in shared memory, which does not change while it is written."""
    size = path.stat().st_size
    with path.open("rb") as file:
        data = memoryview(mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) if size else b"")
    return lambda part: data[part.at : part.at + part.length]


if __name__ == "__main__":
    with suppress(OSError):
        os.nice(NICE)
    Writer().run()
    for folder in sys.argv[1:]:
        shutil.rmtree(folder, ignore_errors=True)
