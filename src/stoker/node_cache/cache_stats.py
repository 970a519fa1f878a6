"""Statistics of the node cache in this process: hits, bytes by their source, and waiting time."""

from __future__ import annotations

import threading
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class CacheStats:
    """Counts since the process began.

    Attributes:
        hits: objects that were complete when this process first asked for them.
        misses: objects that were not.
        origin_bytes: bytes that this process downloaded from origins.
        peer_bytes: bytes that it received from other nodes.
        wait_seconds: seconds that its readers waited for bytes.
    """

    hits: int = 0
    misses: int = 0
    origin_bytes: int = 0
    peer_bytes: int = 0
    wait_seconds: float = 0.0

    def __add__(self, other: CacheStats) -> CacheStats:
        return CacheStats(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __sub__(self, other: CacheStats) -> CacheStats:
        return CacheStats(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))


class StatsCounter:
    """Adds counts up, in any thread."""

    def __init__(self) -> None:
        self._lock, self._counts = threading.Lock(), CacheStats()
        self._asked: set[str] = set()

    def add(self, counts: CacheStats) -> None:
        """Counts something."""
        with self._lock:
            self._counts += counts

    def asked(self, key: str, *, whole: bool) -> None:
        """Counts an object when it is first requested."""
        with self._lock:
            if key not in self._asked:
                self._asked.add(key)
                self._counts += CacheStats(hits=int(whole), misses=int(not whole))

    @property
    def counts(self) -> CacheStats:
        """Returns all counts so far."""
        return self._counts


HERE = StatsCounter()
