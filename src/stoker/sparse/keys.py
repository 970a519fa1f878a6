"""Ids of several tables in one array, with their hashes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stoker.sparse.hashing import GOLDEN, hashes_of, mix64


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
        """Builds keys, with hashes under each table's salt."""
        return cls(ids, tables, hashes_of(ids, salts[tables] if len(salts) > 1 else salts[0]))

    @classmethod
    def concatenated(cls, parts: Sequence[Keys]) -> Keys:
        """Concatenates keys in order; at least one."""
        columns = zip(*((part.ids, part.tables, part.hashes) for part in parts), strict=True)
        return cls(*map(np.concatenate, columns))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, which: np.ndarray) -> Keys:
        return Keys(self.ids[which], self.tables[which], self.hashes[which])

    def deduplicated(self) -> tuple[np.ndarray, np.ndarray, Keys]:
        """Returns the index of each key among the unique ones, the count of each of these, and the unique keys.

        Keys claim places by their hashes, all in one write. At each place the last key wins, and represents
        all that are equal to it; the others claim again by other hashes. As equal keys move together, the result is
        exact.
        """
        count = len(self)
        stands = np.empty(count, np.int64)  # for each key the one that represents it
        claims = np.empty(1 << max(10, (4 * count).bit_length()), np.int32)
        mask = np.uint64(len(claims) - 1)
        left, hashes = np.arange(count), self.hashes
        while len(left):
            places = (hashes & mask).view(np.int64)
            claims[places] = left
            holders = np.take(claims, places)
            same = self.ids[holders] == self.ids[left]
            same &= self.tables[holders] == self.tables[left]
            stands[left[same]] = holders[same]
            other = np.flatnonzero(~same)
            left, hashes = left[other], mix64(hashes[other] + GOLDEN)
        first = np.flatnonzero(stands == np.arange(count))
        numbers = np.empty(count, np.int64)
        numbers[first] = np.arange(len(first))
        inverse = np.take(numbers, stands)
        return inverse, np.bincount(inverse, minlength=len(first)), self[first]


@dataclass(frozen=True)
class Rows:
    """The rows of some keys.

    Attributes:
        unique: int64 [u], row numbers in order of their last key, each once; those below `IdIndex.first` are default
            rows, one for each table.
        inverse: int64 [n], for each key its index in ``unique``.
    """

    unique: np.ndarray
    inverse: np.ndarray
