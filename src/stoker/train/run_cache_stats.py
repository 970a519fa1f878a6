"""What the node cache did for a run, for its metrics and its events."""

from __future__ import annotations

from dataclasses import asdict
from functools import reduce

from stoker.checkpoint.collective import together
from stoker.node_cache.cache_stats import HERE, CacheStats


class RunCacheStats:
    """Counts of the node cache over all processes up to now, and those of this process since. Made by a collective."""

    def __init__(self) -> None:
        self._all = reduce(CacheStats.__add__, together(lambda: HERE.counts))
        self._mine = HERE.counts

    def measures(self) -> dict[str, float]:
        """The fields of a line of metrics."""
        counts = self._all + (HERE.counts - self._mine)
        return {f"cache_{name}": round(n, 3) for name, n in asdict(counts).items()}
