"""A hash index from ids to row numbers: open addressing, vectorised over arrays, without false matches.

Probing is triangular (1, 3, 6, ... entries further), which visits every entry of a table whose size is a power of two,
and whose first steps stay near.

All ids of a call are processed together: each iteration probes once for all ids that are not placed yet. There is no
Python loop over ids.
"""

from __future__ import annotations

import numpy as np

from stoker.sparse.index_entry import DELETED, EMPTY, ROW, ROW_BITS
from stoker.sparse.kernels import kernels

FULL = 0.7  # share of used and deleted entries above which the index grows
AT_ONCE = 2**18  # chunk size when the index is rebuilt, in entries


class IdIndex:
    """Row numbers of the ids of several tables.

    The first rows, one for each table, are the default rows of the tables and belong to no id. The row number of an id
    without a row is 0.

    Args:
        salts: uint64 [tables], hash salt of each table.

    Attributes:
        ids, tables: by row: its id, and the id's table; table -1 if the row is free.
        first: smallest row number of an id.
    """

    def __init__(self, salts: np.ndarray) -> None:
        self.salts, self.first = salts, len(salts)
        size = max(1024, self.first)
        self.ids, self.tables = np.zeros(size, np.int64), np.full(size, -1, np.int16)
        self._top = self.first  # exclusive upper bound of rows that were ever used
        self._free = np.empty(0, np.int64)
        self._deleted = 0
        self._allocate(4096)

    def __len__(self) -> int:
        return self._top - self.first - len(self._free)

    @property
    def top(self) -> int:
        """Exclusive upper bound of the row numbers in use."""
        return self._top

    @property
    def bytes(self) -> int:
        """Memory in bytes of entries, ids and tables."""
        return self._pairs.nbytes + self.ids.nbytes + self.tables.nbytes

    @property
    def rows(self) -> np.ndarray:
        """Rows in use, ascending. int64 [n]."""
        return np.flatnonzero(self.tables[: self._top] >= 0)

    def hashes(self, ids: np.ndarray, tables: np.ndarray) -> np.ndarray:
        """Returns the hashes of ids of several tables, uint64 [n]."""
        return kernels().hashes(ids, tables, self.salts)

    def find(self, ids: np.ndarray, tables: np.ndarray, hashes: np.ndarray) -> np.ndarray:
        """Returns row numbers, 0 for ids without a row; int64 [n].

        Args:
            ids: int64 [n].
            tables: int64 [n].
            hashes: results of `hashes`.
        """
        return kernels().find(self._pairs, ids, tables, hashes)[0]

    def insert(self, ids: np.ndarray, tables: np.ndarray, hashes: np.ndarray) -> np.ndarray:
        """Assigns rows to ids without one; an id may occur several times. Returns row numbers, int64 [n]."""
        if not len(ids):
            return np.empty(0, np.int64)
        self._reserve(len(ids))
        entries = np.empty((len(ids), 2), np.int64)
        entries[:, 0] = ids
        numbers = np.arange(len(ids))
        np.bitwise_or(tables << ROW_BITS, numbers, out=entries[:, 1])  # the index in this call, until rows are assigned
        at, winners = self._place(entries, hashes)
        first = np.flatnonzero(winners == numbers)
        rows = self._take_rows(len(first))
        self._pairs[at[first], 1] = (tables[first] << ROW_BITS) | rows
        self.ids[rows], self.tables[rows] = ids[first], tables[first]
        numbers[first] = rows
        return numbers[winners]

    def remove(self, rows: np.ndarray) -> None:
        """Frees rows in use; row numbers are unique."""
        ids, tables = self.ids[rows], self.tables[rows].astype(np.int64)
        found, at = kernels().find(self._pairs, ids, tables, self.hashes(ids, tables))
        assert np.array_equal(found, rows)
        self._pairs[at, 1] = DELETED
        self._deleted += len(rows)
        self.tables[rows] = -1
        self._free = np.concatenate([self._free, rows[::-1]])

    # -- entries -----------------------------------------------------------------------------------------------

    def _allocate(self, capacity: int) -> None:
        self._pairs = np.empty((capacity, 2), np.int64)
        self._pairs[:, 1] = EMPTY
        self._entries = self._pairs.view(np.complex128)[:, 0]  # 16 bytes that are copied as one
        self._mask = np.uint64(capacity - 1)
        self._deleted = 0

    def _place(self, entries: np.ndarray, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Writes entries of absent ids to free slots; repeated ids share one slot.

        Returns:
            the slot of each entry, and the number in the slot in place of a row.
        """
        whole = entries.view(np.complex128)[:, 0]
        mask = self._mask.view(np.int64)
        ended, winners = (hashes & self._mask).view(np.int64), np.empty(len(entries), np.int64)
        going, at, step = np.arange(len(entries)), ended.copy(), 0
        while len(going):
            room = np.flatnonzero(self._pairs[at, 1] < 0)
            self._entries[at[room]] = whole[going[room]]  # the last of several writes to one slot wins
            pairs = np.take(self._entries, at).view(np.int64).reshape(-1, 2)
            mine = entries[going]
            same = (pairs[:, 0] == mine[:, 0]) & ((pairs[:, 1] ^ mine[:, 1]) >> ROW_BITS == 0)
            done = going[same]
            ended[done], winners[done] = at[same], pairs[same, 1] & ROW
            going, step = going[~same], step + 1
            at = (at[~same] + step) & mask
        return ended, winners

    def _reserve(self, more: int) -> None:
        """Reserves capacity for further entries; rebuilds the index without deleted entries if it is too full."""
        capacity = len(self._pairs)
        if len(self) + self._deleted + more <= FULL * capacity:
            return
        needed = (len(self) + more) / FULL
        while capacity < needed:
            capacity *= 2
        rows = self.rows
        self._allocate(capacity)
        for part in np.split(rows, range(AT_ONCE, len(rows), AT_ONCE)):
            ids, tables = self.ids[part], self.tables[part].astype(np.int64)
            entries = np.stack([ids, (tables << ROW_BITS) | part], axis=1)
            self._place(entries, self.hashes(ids, tables))

    # -- rows --------------------------------------------------------------------------------------------------

    def _take_rows(self, count: int) -> np.ndarray:
        """Returns free rows, the most recently freed ones first."""
        again = min(count, len(self._free))
        old = self._free[len(self._free) - again :][::-1]
        self._free = self._free[: len(self._free) - again]
        new = np.arange(self._top, self._top + count - again)
        self._top += len(new)
        if self._top > len(self.ids):
            size = max(self._top, len(self.ids) * 3 // 2)
            self.ids = lengthened_copy(self.ids, size)
            self.tables = lengthened_copy(self.tables, size, -1)
        return np.concatenate([old, new])


def lengthened_copy(values: np.ndarray, size: int, fill: int = 0) -> np.ndarray:
    """Returns a copy that is longer along the first dimension."""
    longer = np.full((size, *values.shape[1:]), fill, values.dtype)
    longer[: len(values)] = values
    return longer
