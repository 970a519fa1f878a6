"""Counter of reads of a memory-mapped file that waited for the disk."""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

OFTEN = 0.01  # share of waiting reads above which prefetching pays: a wait costs about a hundred prefetches of a row
LAST = 2**14  # most recent reads, which count in full; earlier ones count by half, a quarter, ...


def _page_faults() -> int:
    """Returns the number of major page faults so far of the calling thread (on Linux; elsewhere of the process)."""
    return resource.getrusage(getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)).ru_majflt


class ReadWaits:
    """Counts reads, and their page faults that waited for the disk. Cached pages cause none.

    Args:
        faults: returns the calling thread's number of major page faults.
    """

    def __init__(self, faults: Callable[[], int] = _page_faults) -> None:
        self._faults = faults
        self._lock = threading.Lock()
        self._reads = self._waits = 0

    @contextmanager
    def counted(self, reads: int) -> Iterator[None]:
        """Counts the page faults of this thread within the block, which makes ``reads`` reads."""
        before = self._faults()
        yield
        waits = self._faults() - before
        with self._lock:
            if self._reads > LAST:
                self._reads, self._waits = self._reads // 2, self._waits // 2
            self._reads, self._waits = self._reads + reads, self._waits + waits

    @property
    def often(self) -> bool:
        """Whether reads wait often enough for prefetching to pay."""
        return self._waits > OFTEN * self._reads
