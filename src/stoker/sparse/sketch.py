"""Approximate counts of ids in fixed memory: a count-min sketch (Cormode and Muthukrishnan, 2005)."""

from __future__ import annotations

import numpy as np

from stoker.sparse.hashing import BUCKETS, buckets_of
from stoker.splitmix64 import GOLDEN, mix64

DEPTH = 4


class CountMinSketch:
    """Counts that never underestimate.

    Counters are divided by `buckets_of`, and an id shares counters only with ids of its own bucket. A process has
    the counters of the buckets that it owns, so the counts do not depend on the number of processes.

    Args:
        cells: for each of four hash functions, in all buckets of all processes together; at least one a bucket.
    """

    def __init__(self, cells: int, *, rank: int = 0, world: int = 1) -> None:
        self._world = world
        self.buckets = np.arange(rank, BUCKETS, world)
        self._cells = -(-cells // BUCKETS)
        self.counts = np.zeros((len(self.buckets), DEPTH, self._cells), np.int32)

    @staticmethod
    def bytes_of(cells: int, world: int = 1) -> int:
        """Returns the memory of one of ``world`` processes' counters."""
        return -(-BUCKETS // world) * DEPTH * -(-cells // BUCKETS) * np.dtype(np.int32).itemsize

    def add(self, hashes: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Adds occurrences of distinct ids; returns the counts after all of them, int64 [n]."""
        at = buckets_of(hashes)[:, None] // self._world * DEPTH + np.arange(DEPTH)
        draws = mix64(hashes[:, None] + np.arange(1, DEPTH + 1, dtype=np.uint64) * GOLDEN)
        flat = at * self._cells + (draws % np.uint64(self._cells)).view(np.int64)
        cells = self.counts.reshape(-1)
        np.add.at(cells, flat, np.broadcast_to(counts[:, None], flat.shape).astype(np.int32))
        return cells[flat].min(1).astype(np.int64)

    def load(self, buckets: np.ndarray, counts: np.ndarray) -> None:
        """Takes over the counters of those buckets that this process owns."""
        mine = buckets % self._world == self.buckets[0]
        self.counts[buckets[mine] // self._world] = counts[mine]
