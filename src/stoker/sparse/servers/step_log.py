"""The log from which a server restarts where it ended: a snapshot of its rows, and every step after it."""

from __future__ import annotations

import json
import os
import shutil
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file

from stoker.errors import DiskFailed, reason_of
from stoker.files import flush_folder
from stoker.sparse.servers.server_connection import DTYPES
from stoker.sparse.sparse_state import SparseState

_FIRST, _BASES = "first-step", "bases"  # files of a snapshot in addition to its parts
_EVICTED = ("ids", "tables", "steps")
_HEAD = struct.Struct("<IIQ")  # checksum of the rest, bytes of the header, bytes of the arrays


class StepLog:
    """Snapshots and steps in a folder.

    A record that was being written when the process or the machine ended is truncated: its step did not happen. Steps
    are in the page cache when they count, and snapshots on the disk: a killed process loses nothing, a machine that
    loses power may lose steps that were not yet written back.

    Attributes:
        first: number of steps before the first one of this log.

    Raises:
        DiskFailed: the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        counted = folder / f"snapshot-{self._newest()}" / _FIRST
        self.first = int(counted.read_text()) if counted.exists() else 0
        self._open()

    def snapshot(self) -> Iterator[SparseState]:
        """Yields the parts of the newest snapshot; none without a snapshot."""
        for path in sorted((self._folder / f"snapshot-{self._newest()}").glob("*.safetensors")):
            yield SparseState.from_tensors(load_file(path))

    def bases(self) -> tuple[dict[str, int], list[np.ndarray]] | None:
        """Returns the bases that `begin` stored with the newest snapshot; None if there is no snapshot."""
        path = self._folder / f"snapshot-{self._newest()}" / _BASES
        if not path.exists():
            return None
        with safe_open(path, "np") as file:
            return json.loads(file.metadata()["bases"]), [file.get_tensor(name) for name in _EVICTED]

    def steps(self) -> Iterator[tuple[dict[str, Any], list[np.ndarray]]]:
        """Yields the steps after the snapshot. An incomplete last record is truncated."""
        path, end = Path(self._file.name), 0
        data = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)
        while (record := _record_at(data, end)) is not None:
            header, arrays, end = record
            yield header, arrays
        del data
        os.truncate(path, end)
        self._end = end

    def append(self, header: dict[str, Any], arrays: Sequence[np.ndarray]) -> None:
        """Writes a step."""
        arrays = [np.ascontiguousarray(array) for array in arrays]
        text = json.dumps({**header, "arrays": [[array.dtype.str, array.shape] for array in arrays]}).encode()
        parts: list[bytes | memoryview] = [text, *(array.reshape(-1).view(np.uint8).data for array in arrays)]
        checksum = 0
        for part in parts:
            checksum = zlib.crc32(part, checksum)
        try:
            self._file.truncate(self._end)  # remains of a failed write
            size = 0
            for part in (_HEAD.pack(checksum, len(text), sum(map(len, parts[1:]))), *parts):
                size += self._write(part)
        except OSError as error:
            raise DiskFailed(f"{self._folder} cannot be written: {reason_of(error)}") from error
        self._end += size

    def begin(
        self, parts: Iterable[SparseState], *, first: int, bases: Mapping[str, int], evicted: Sequence[np.ndarray]
    ) -> None:
        """Writes a snapshot, after which the steps before are not needed.

        Args:
            first: the number of those steps.
            bases, evicted: from `EvictedIds.saved`.
        """
        partial = self._folder / "partial"
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            for number, part in enumerate(parts):
                path = partial / f"{number:06}.safetensors"
                save_file({name: tensor.contiguous() for name, tensor in part.tensors().items()}, path)
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            beside = {name: np.ascontiguousarray(array) for name, array in zip(_EVICTED, evicted, strict=True)}
            save_arrays(beside, partial / _BASES, metadata={"bases": json.dumps(dict(bases))})
            with (partial / _BASES).open("rb") as file:
                os.fsync(file.fileno())
            with (partial / _FIRST).open("w") as counted:
                counted.write(str(first))
                counted.flush()
                os.fsync(counted.fileno())
            target = self._folder / f"snapshot-{self._newest() + 1}"
            flush_folder(partial)
            partial.rename(target)
            flush_folder(self._folder)  # before the steps that it replaces are deleted
        except (OSError, SafetensorError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise DiskFailed(f"{self._folder} cannot be written: {reason_of(error)}") from error
        self._file.close()
        self.first = first
        for path in self._folder.iterdir():
            if path != target:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        self._open()

    def clear(self) -> None:
        """Deletes all snapshots and steps."""
        self._file.close()
        shutil.rmtree(self._folder)
        self._folder.mkdir()
        self._open()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _open(self) -> None:
        try:  # unbuffered: a buffer would write the remains of a failed write with the next one
            self._file = (self._folder / f"steps-{self._newest()}").open("ab", buffering=0)
        except OSError as error:
            raise DiskFailed(f"{self._folder} cannot be written: {reason_of(error)}") from error
        self._end = self._file.tell()

    def _write(self, part: bytes | memoryview) -> int:
        at = 0
        while at < len(part):  # a write may end early
            at += self._file.write(memoryview(part)[at:])
        return len(part)

    def _newest(self) -> int:
        found = [int(path.name.partition("-")[2]) for path in self._folder.glob("snapshot-*")]
        return max(found, default=0)


def _record_at(data: np.ndarray, at: int) -> tuple[dict[str, Any], list[np.ndarray], int] | None:
    """Returns a record and its end; None if there is no complete one."""
    if at + _HEAD.size > len(data):
        return None
    checksum, text, size = _HEAD.unpack(data[at : at + _HEAD.size].tobytes())
    begin, end = at + _HEAD.size, at + _HEAD.size + text + size
    if not text or end > len(data) or zlib.crc32(data[begin:end].data) != checksum:  # 0 is the checksum of nothing
        return None
    header = json.loads(data[begin : begin + text].tobytes())
    arrays, at = [], begin + text
    for dtype, shape in header.pop("arrays"):
        assert dtype in DTYPES
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        arrays.append(np.frombuffer(data[at : at + count].tobytes(), dtype).reshape(shape))
        at += count
    return header, arrays, end
