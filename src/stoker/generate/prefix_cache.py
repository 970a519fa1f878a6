"""Prefix cache: keys and values of earlier prompts, so that requests with a common prefix compute only the rest.

The states of linear attention are those after the last token of a sequence, so such a sequence is a prefix whole or not
at all.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

import numpy as np

from stoker.generate.row_cache import Kept


@dataclass(frozen=True)
class KeptSequence:
    """A sequence with its keys and values."""

    ids: np.ndarray
    kept: Kept

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values."""
        return sum(keys.nbytes + values.nbytes for keys, values in self.kept)


class Prefixes:
    """LRU cache of sequences by adapter, up to a number of bytes.

    Args:
        states: number of layers with states, the last ones of a sequence.
    """

    def __init__(self, budget: int, *, states: int = 0) -> None:
        self.budget: Final = budget
        self._states = states
        self._held: OrderedDict[tuple[str | None, bytes], KeptSequence] = OrderedDict()

    def longest(self, adapter: str | None, ids: np.ndarray) -> tuple[Kept, int] | None:
        """Returns the keys and values of the longest common prefix, and its length; None without any."""
        best, length = None, 0
        for key, remembered in self._held.items():
            if key[0] != adapter or (common := common_length(remembered.ids, ids)) <= length:
                continue
            if not self._states or common == len(remembered.ids):
                best, length = key, common
        if best is None:
            return None
        self._held.move_to_end(best)
        kept = self._held[best].kept
        cut = len(kept) - self._states
        return (*((k[:, :length], v[:, :length]) for k, v in kept[:cut]), *kept[cut:]), length

    def remember(self, adapter: str | None, ids: np.ndarray, kept: Kept) -> None:
        """Copies a sequence's keys and values into the cache, and evicts the least recently used ones."""
        size = sum(k.nbytes + v.nbytes for k, v in kept)
        if size > self.budget:
            return
        # The new sequence contains those that it continues, but not their states.
        for key, held in [] if self._states else list(self._held.items()):
            if key[0] == adapter and common_length(held.ids, ids) == len(held.ids):
                del self._held[key]
        self._held[adapter, ids.tobytes()] = KeptSequence(ids, tuple((k.clone(), v.clone()) for k, v in kept))
        while sum(held.nbytes for held in self._held.values()) > self.budget:
            self._held.popitem(last=False)

    def forget(self) -> None:
        """Clears the cache, because the weights have changed."""
        self._held.clear()


def common_length(a: np.ndarray, b: np.ndarray) -> int:
    """Returns the length of the common prefix of two sequences."""
    size = min(len(a), len(b))
    differ = np.flatnonzero(a[:size] != b[:size])
    return int(differ[0]) if len(differ) else size
