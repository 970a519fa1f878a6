"""A log of rows in a memory-mapped file: records are appended, and the file is rewritten once half of it is dead."""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

import numpy as np

from stoker.errors import DiskFailed, Problem, UserError, reason_of
from stoker.sparse.id_index import grown
from stoker.sparse.read_waits import ReadWaits

_FIRST = 4096  # records
_AT_ONCE = 2**16  # records that are copied together


class RowLog:
    """The last record of each row number.

    The file has no name, so that it disappears with the process, in whatever way it ends. Its pages stay in
    the page cache as long as the machine has memory for it.

    Args:
        folder: the file's folder; it is created if needed.
        record: bytes of a record.

    Attributes:
        waits: what is known of reads.

    Raises:
        UserError: the folder cannot be written.
    """

    def __init__(self, folder: Path, record: int) -> None:
        self._folder, self._record = folder, record
        self.waits = ReadWaits()
        self._places = np.full(1024, -1, np.int32)  # by row, the record's number
        self._end = self._live = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._open(_FIRST)
        except OSError as error:
            raise UserError(Problem(f"rows cannot be kept in {folder}: {reason_of(error)}")) from error

    @property
    def bytes(self) -> int:
        """Memory of the places of records."""
        return self._places.nbytes

    @property
    def file_bytes(self) -> int:
        """Size of the part of the file that has records, dead ones too."""
        return self._end * self._record

    def append(self, rows: np.ndarray, records: np.ndarray) -> None:
        """Writes records of rows that have none.

        Args:
            rows: int64 [n], each once.
            records: uint8 [n, bytes].
        """
        if self._end + len(rows) > len(self._data):
            self._make_room(len(rows))
        if (top := int(rows.max(initial=0)) + 1) > len(self._places):
            self._places = grown(self._places, max(top, len(self._places) * 3 // 2), -1)
        self._data[self._end : self._end + len(rows)] = records
        self._places[rows] = np.arange(self._end, self._end + len(rows))
        self._end += len(rows)
        self._live += len(rows)

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Records of rows that have one. uint8 [n, bytes]."""
        with self.waits.counted(len(rows)):
            return np.take(self._data, self._places[rows], axis=0)

    def drop(self, rows: np.ndarray) -> None:
        """Forgets the records of rows, where they have any; each row is named once."""
        rows = rows[rows < len(self._places)]
        rows = rows[self._places[rows] >= 0]
        self._places[rows] = -1
        self._live -= len(rows)

    def touch(self, rows: np.ndarray) -> None:
        """Brings the records of rows into the page cache; for another thread than the one that writes."""
        data, places = self._data, self._places
        at = places[rows[rows < len(places)]]
        at = at[(at >= 0) & (at < len(data))]
        with self.waits.counted(len(at)):
            np.take(data, np.sort(at), axis=0)

    def _open(self, capacity: int) -> None:
        descriptor, name = tempfile.mkstemp(prefix="rows-", dir=self._folder)
        Path(name).unlink()
        self._file = os.fdopen(descriptor, "r+b")
        self._map(capacity)

    def _map(self, capacity: int) -> None:
        try:  # blocks are reserved, as writing to a mapping on a full disk would kill the process
            os.posix_fallocate(self._file.fileno(), 0, capacity * self._record)
        except OSError as error:
            raise DiskFailed(f"{self._folder} has no room for the rows of a table: {reason_of(error)}") from error
        mapped = mmap.mmap(self._file.fileno(), capacity * self._record)
        mapped.madvise(mmap.MADV_RANDOM)
        self._data = np.frombuffer(mapped, np.uint8).reshape(capacity, self._record)

    def _make_room(self, more: int) -> None:
        """Rewrites the file without dead records where they are half of it, and lengthens it."""
        live = np.flatnonzero(self._places >= 0)
        capacity = len(self._data)
        if self._live > self._end // 2:
            self._map(max(capacity * 3 // 2, self._end + more))
            return
        old, file = self._data, self._file
        self._open(max(_FIRST, 2 * (self._live + more)))
        live = live[np.argsort(self._places[live])]
        self._end = 0
        for part in np.split(live, range(_AT_ONCE, len(live), _AT_ONCE)):
            self._data[self._end : self._end + len(part)] = np.take(old, self._places[part], axis=0)
            self._places[part] = np.arange(self._end, self._end + len(part))
            self._end += len(part)
        file.close()
