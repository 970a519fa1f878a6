"""Byte layout of a checkpoint file around the tensors, so that a process without torch can write it.

A file of torch.distributed.checkpoint is a sequence of archives, one per tensor: a head, the tensor's bytes, a tail.
Heads and tails depend on names, shapes and dtypes only, so they are computed once for all checkpoints of a run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

BLOCK = 8 << 20  # bytes written and hashed at a time: fits into a processor's cache


@dataclass(frozen=True)
class DcpFilePart:
    """A head, followed by the bytes of a tensor.

    Attributes:
        head: length of the head, in bytes.
        at: start of the tensor's bytes in the staged data.
        length: length of the tensor, in bytes.
    """

    head: int
    at: int
    length: int


@dataclass(frozen=True)
class DcpFileLayout:
    """A checkpoint file without its tensors' bytes.

    Attributes:
        name: name of the file.
        parts: its parts, in order.
        frame: the bytes of all heads, followed by the last tail.
    """

    name: str
    parts: tuple[DcpFilePart, ...]
    frame: bytes

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return len(self.frame) + sum(part.length for part in self.parts)

    def write(self, file: IO[bytes], data: Callable[[DcpFilePart], memoryview]) -> str:
        """Writes the file; returns its SHA-256.

        Args:
            data: returns the bytes of a part's tensor.
        """
        summed = hashlib.sha256()
        at = 0
        for part in self.parts:
            _write(file, memoryview(self.frame)[at : at + part.head], summed)
            _write(file, data(part), summed)
            at += part.head
        _write(file, memoryview(self.frame)[at:], summed)
        return summed.hexdigest()

    @staticmethod
    def files(path: Path) -> tuple[Path, Path]:
        """Returns the paths that `keep` writes: the parts, and the frame."""
        return path, path.with_suffix(".frame")

    def keep(self, path: Path) -> None:
        """Writes the layout itself, for another process to `read`."""
        parts, frame = self.files(path)
        frame.write_bytes(self.frame)
        parts.write_text(json.dumps({"name": self.name, "parts": [asdict(part) for part in self.parts]}))

    @classmethod
    def read(cls, path: Path) -> DcpFileLayout:
        """Reads a layout written by `keep`."""
        parts, frame = cls.files(path)
        kept = json.loads(parts.read_text())
        return cls(kept["name"], tuple(DcpFilePart(**part) for part in kept["parts"]), frame.read_bytes())


def _write(file: IO[bytes], data: memoryview, summed: hashlib._Hash) -> None:
    while data:  # a nearly full disk accepts a part; the next write raises the error
        done = file.write(data[:BLOCK])
        summed.update(data[:done])
        data = data[done:]


def sum_of(file: IO[bytes]) -> str:
    """Returns the SHA-256 of an open file."""
    return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
