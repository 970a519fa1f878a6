"""Ids of several tables in one array, with their hashes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stoker.sparse.hashing import hashes_of


@dataclass(frozen=True)
class Keys:
    """Ids and the tables they belong to.

    Attributes:
        ids: int64 [n].
        tables: int64 [n], numbers of tables.
        hashes: uint64 [n], of `hashes_of` with the table's salt.
    """

    ids: np.ndarray
    tables: np.ndarray
    hashes: np.ndarray

    @classmethod
    def of(cls, ids: np.ndarray, tables: np.ndarray, salts: np.ndarray) -> Keys:
        """With hashes under each table's salt."""
        return cls(ids, tables, hashes_of(ids, salts[tables] if len(salts) > 1 else salts[0]))

    @classmethod
    def concatenated(cls, parts: Sequence[Keys]) -> Keys:
        """Those of several, in order; at least one."""
        columns = zip(*((part.ids, part.tables, part.hashes) for part in parts), strict=True)
        return cls(*map(np.concatenate, columns))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, which: np.ndarray) -> Keys:
        return Keys(self.ids[which], self.tables[which], self.hashes[which])
