"""Statistics of the node cache for a run's metrics and events."""

from __future__ import annotations

from dataclasses import asdict
from functools import reduce

from stoker.checkpoint.object_collectives import run_on_all_ranks
from stoker.node_cache.cache_stats import HERE, CacheStats


class RunCacheStats:
    """Cache counts of all processes at creation, plus this process' counts since. Creation is a collective."""

    def __init__(self) -> None:
        self._all = reduce(CacheStats.__add__, run_on_all_ranks(lambda: HERE.counts))
        self._mine = HERE.counts

    def measures(self) -> dict[str, float]:
        """Returns the fields of a metrics line."""
        counts = self._all + (HERE.counts - self._mine)
        return {f"cache_{name}": round(n, 3) for name, n in asdict(counts).items()}
