"""Ids of several tables in one array, with their hashes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stoker.sparse.hashing import salt_of
from stoker.sparse.kernels import kernels
from stoker.sparse.table_settings import TableSettings


@dataclass(frozen=True)
class Keys:
    """Ids and the tables they belong to.

    Attributes:
        ids: int64 [n].
        tables: int64 [n], numbers of tables.
        hashes: uint64 [n], results of `hashes_of` with the table's salt.
    """

    ids: np.ndarray
    tables: np.ndarray
    hashes: np.ndarray

    @classmethod
    def of(cls, ids: np.ndarray, tables: np.ndarray, salts: np.ndarray) -> Keys:
        """Builds keys, with hashes under each table's salt."""
        return cls(ids, tables, kernels().hashes(ids, tables, salts))

    @classmethod
    def concatenated(cls, parts: Sequence[Keys]) -> Keys:
        """Concatenates keys in order; at least one."""
        columns = zip(*((part.ids, part.tables, part.hashes) for part in parts), strict=True)
        return cls(*map(np.concatenate, columns))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, which: np.ndarray) -> Keys:
        return Keys(self.ids[which], self.tables[which], self.hashes[which])

    def deduplicated(self, counts: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray, Keys]:
        """Returns the index of each key among the unique ones, the count of each of these, and the unique keys.

        Unique keys are in the order of their first occurrence.

        Args:
            counts: int64 [n], occurrences that each key represents; one each by default.
        """
        places, first = kernels().deduplicate(self.ids, self.tables, self.hashes)
        return places, np.bincount(places, counts, len(first)).astype(np.int64, copy=False), self[first]


NO_KEYS = Keys(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.uint64))


def salts_of(tables: Sequence[TableSettings]) -> np.ndarray:
    """Returns the salt of each table's keys, uint64 [tables]."""
    return np.array([salt_of("index", table.name) for table in tables])


@dataclass(frozen=True)
class Rows:
    """The rows of some keys.

    Attributes:
        unique: int64 [u], row numbers of the unique keys, in the order of their first occurrence. Those below
            `IdIndex.first` are default rows, one for each table, and may repeat.
        inverse: int64 [n], index of each key's row in ``unique``.
    """

    unique: np.ndarray
    inverse: np.ndarray
