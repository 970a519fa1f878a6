"""A log of rows in a memory-mapped file: records are appended, and the file is rewritten once half of it is dead."""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

import numpy as np

from stoker.errors import DiskFailed, Problem, UserError, reason_of
from stoker.sparse.id_index import lengthened_copy
from stoker.sparse.read_waits import ReadWaits

_FIRST = 4096  # records
_AT_ONCE = 2**16  # chunk size of copies, in records


class RowLog:
    """The last record of each row number.

    The file has no name, so that it disappears with the process, however it ends. Its pages stay in the page cache
    while the machine has free memory.

    Args:
        folder: the file's folder; it is created if needed.
        record: size of a record in bytes.

    Attributes:
        waits: counter of reads that waited for the disk.

    Raises:
        UserError: the folder cannot be written.
    """

    def __init__(self, folder: Path, record: int) -> None:
        self._folder, self._record = folder, record
        self.waits = ReadWaits()
        self._places = np.full(1024, -1, np.int32)  # number of each row's record
        self._end = self._live = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._open(_FIRST)
        except OSError as error:
            raise UserError(Problem(f"rows cannot be kept in {folder}: {reason_of(error)}")) from error

    @property
    def bytes(self) -> int:
        """Memory of the records' positions in bytes."""
        return self._places.nbytes

    @property
    def file_bytes(self) -> int:
        """Size of the used part of the file in bytes, with dead records."""
        return self._end * self._record

    def append(self, rows: np.ndarray, records: np.ndarray) -> None:
        """Appends records of rows that have none.

        Args:
            rows: int64 [n], unique.
            records: uint8 [n, bytes].
        """
        if self._end + len(rows) > len(self._data):
            self._make_room(len(rows))
        if (top := int(rows.max(initial=0)) + 1) > len(self._places):
            self._places = lengthened_copy(self._places, max(top, len(self._places) * 3 // 2), -1)
        self._data[self._end : self._end + len(rows)] = records
        self._places[rows] = np.arange(self._end, self._end + len(rows))
        self._end += len(rows)
        self._live += len(rows)

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Returns the records of rows that have one, uint8 [n, bytes]."""
        with self.waits.counted(len(rows)):
            return np.take(self._data, self._places[rows], axis=0)

    def drop(self, rows: np.ndarray) -> None:
        """Drops the records of rows, if they have any; rows are unique."""
        rows = rows[rows < len(self._places)]
        rows = rows[self._places[rows] >= 0]
        self._places[rows] = -1
        self._live -= len(rows)

    def touch(self, rows: np.ndarray) -> None:
        """Loads the records of rows into the page cache; may run in another thread than the one that writes."""
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
            mapped = mmap.mmap(self._file.fileno(), capacity * self._record)
        except OSError as error:
            raise DiskFailed(f"{self._folder} has no room for the rows of a table: {reason_of(error)}") from error
        mapped.madvise(mmap.MADV_RANDOM)
        self._data = np.frombuffer(mapped, np.uint8).reshape(capacity, self._record)

    def _make_room(self, more: int) -> None:
        """Grows the file; rewrites it without dead records if they are half of it."""
        if self._live > self._end // 2:
            self._map(max(len(self._data) * 3 // 2, self._end + more))
            return
        old, file = self._data, self._file
        try:
            self._open(max(_FIRST, 2 * (self._live + more)))
        except OSError as error:
            raise DiskFailed(f"{self._folder} has no room for the rows of a table: {reason_of(error)}") from error
        live = np.flatnonzero(self._places >= 0)
        live = live[np.argsort(self._places[live])]
        self._end = 0
        for part in np.split(live, range(_AT_ONCE, len(live), _AT_ONCE)):
            self._data[self._end : self._end + len(part)] = np.take(old, self._places[part], axis=0)
            self._places[part] = np.arange(self._end, self._end + len(part))
            self._end += len(part)
        file.close()
