"""How often reads of a memory-mapped file have waited for the disk."""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

OFTEN = 0.01  # reads that wait, of all: a wait takes about a hundred times as long as asking for a row beforehand
LAST = 2**14  # reads that count in full; earlier ones by half, a quarter, ...


def _page_faults() -> int:
    """Pages that the calling thread has had to read from a disk so far (Linux; elsewhere those of the process)."""
    return resource.getrusage(getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)).ru_majflt


class ReadWaits:
    """Counts reads, and page faults that had to wait for the disk: where pages are cached there are none.

    Args:
        faults: counts the calling thread's.
    """

    def __init__(self, faults: Callable[[], int] = _page_faults) -> None:
        self._faults = faults
        self._lock = threading.Lock()
        self._reads = self._waits = 0

    @contextmanager
    def counted(self, reads: int) -> Iterator[None]:
        """Counts what is read within, by this thread."""
        before = self._faults()
        yield
        waits = self._faults() - before
        with self._lock:
            if self._reads > LAST:
                self._reads, self._waits = self._reads // 2, self._waits // 2
            self._reads, self._waits = self._reads + reads, self._waits + waits

    @property
    def often(self) -> bool:
        """Whether reads wait often enough that it pays to ask for rows beforehand."""
        return self._waits > OFTEN * self._reads
