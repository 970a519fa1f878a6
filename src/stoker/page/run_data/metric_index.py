"""Columns of long runs, cached on disk, so that the next process of the page does not read their lines again.

A file is a sequence of blocks, each a line of JSON (`IndexBlock`) followed by its columns as float64. A block is
appended as a run grows. Reading stops at a block that is corrupt, or belongs to another file of metrics: the later
lines are read from the metrics, which are authoritative.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any
from zlib import crc32

import numpy as np

from stoker.files import no_link
from stoker.page.run_data.metric_columns import Numbers

FORMAT = 2
WORTH = 5_000  # new lines that are worth a block; reading them takes some 15 ms
MOST_FILES = 256  # of runs; the one that was used longest ago goes first
ENDS = 256  # bytes of the metrics before a block's end by which it is recognised
MOST_HEADER = 1 << 20  # bytes


@dataclass(frozen=True)
class IndexBlock:
    """The header of a block.

    Attributes:
        inode: of the file of metrics.
        begin, end: the bytes of it that were read.
        ends: the digest of the last bytes before ``end``.
        count: lines.
        keys: of the columns, in order.
        last: the newest line.
        sum: CRC-32 of all the other values and the columns.
    """

    inode: int
    begin: int
    end: int
    ends: str
    count: int
    keys: list[str]
    last: dict[str, Any]
    sum: int
    format: int = FORMAT


class MetricIndex:
    """The blocks of one file of metrics, in a folder of such files."""

    def __init__(self, folder: Path, metrics: Path) -> None:
        self._path = folder / f"{hashlib.sha256(os.fsencode(metrics)).hexdigest()[:32]}.columns"
        self._size = 0  # bytes of the file that this process has verified
        self.end = 0  # bytes of the metrics that they cover
        self.count = 0  # lines in them

    def read(self, metrics: IO[bytes]) -> list[tuple[IndexBlock, dict[str, Numbers]]]:
        """Returns the blocks that belong to a file of metrics, oldest first, each with its columns.

        Where others follow them the file is written from its beginning by the next `append`.
        """
        self.end = self.count = self._size = 0
        number = os.fstat(metrics.fileno()).st_ino
        blocks: list[tuple[IndexBlock, dict[str, Numbers]]] = []
        try:
            with open(self._path, "rb", opener=no_link) as file:
                os.utime(self._path)
                while (found := _block(file)) is not None:
                    block = found[0]
                    if block.inode != number or block.begin != self.end or block.ends != _digest(metrics, block.end):
                        break
                    blocks.append(found)
                    self.end, self.count, self._size = block.end, self.count + block.count, file.tell()
                if self._size != os.fstat(file.fileno()).st_size:
                    self.end = self.count = self._size = 0
        except OSError:
            pass
        return blocks

    def append(self, metrics: IO[bytes], end: int, columns: Mapping[str, Numbers], last: dict[str, Any]) -> None:
        """Appends a block with the lines of the metrics from the last block on to ``end``.

        A file that another process has written to meanwhile is left unchanged.
        """
        data = b"".join(column.tobytes() for column in columns.values())
        count = len(next(iter(columns.values()), ()))
        number = os.fstat(metrics.fileno()).st_ino
        block = IndexBlock(
            inode=number,
            begin=self.end,
            end=end,
            ends=_digest(metrics, end),
            count=count,
            keys=list(columns),
            last=last,
            sum=0,
        )
        block = replace(block, sum=_sum(block, data))
        whole = json.dumps(asdict(block)).encode() + b"\n" + data
        try:
            if not self._size:
                self._begin(whole)
            elif self._path.stat().st_size == self._size:
                with open(self._path, "ab", opener=no_link) as file:
                    file.write(whole)
        except OSError:  # a full disk only makes the next start slower
            pass
        self._size += len(whole)
        self.end, self.count = end, self.count + count

    def _begin(self, content: bytes) -> None:
        folder = self._path.parent
        folder.mkdir(mode=0o700, exist_ok=True)
        partial = folder / f".{self._path.name}.{os.getpid()}"
        partial.write_bytes(content)
        partial.replace(self._path)
        files = sorted(folder.glob("*.columns"), key=lambda path: path.stat().st_mtime)
        for path in files[:-MOST_FILES]:
            path.unlink(missing_ok=True)


def _digest(metrics: IO[bytes], end: int) -> str:
    """Returns the digest of the bytes before ``end``."""
    begin = max(0, end - ENDS)
    metrics.seek(begin)
    return hashlib.sha256(metrics.read(end - begin)).hexdigest()


def _sum(block: IndexBlock, data: bytes) -> int:
    return crc32(data, crc32(json.dumps(asdict(replace(block, sum=0))).encode()))


def _block(file: IO[bytes]) -> tuple[IndexBlock, dict[str, Numbers]] | None:
    """Returns the next block of a file; None at its end, or if it is corrupt."""
    try:
        block = IndexBlock(**json.loads(file.readline(MOST_HEADER)))
        data = file.read(8 * block.count * len(block.keys))
        if block.format != FORMAT or _sum(block, data) != block.sum:
            return None
        table = np.frombuffer(data, dtype=np.float64).reshape(len(block.keys), block.count)
    except (ValueError, TypeError):
        return None
    return block, dict(zip(block.keys, table, strict=True))
