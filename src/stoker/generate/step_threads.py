"""Number of threads for the products of a step: all, or one while other work uses the cores.

A step of generation has hundreds of small products. Its threads spin between products, as sleeping costs more than a
product takes. Where other work holds a core, they spin until they are scheduled again, and a step takes many times as
long; a single thread waits for none. The faster choice changes over time, so it is measured from time to time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

TRIED = 3  # steps per trial; the fastest one counts
SHARE = 0.05  # largest share of the time for trials
FASTER = 0.95  # relative time below which a change is worth it


class StepThreads:
    """Measures steps with all threads and with one, and uses the faster number.

    Results depend on the number of threads in their last bits.
    """

    def __init__(
        self,
        most: int | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
        use: Callable[[int], None] = torch.set_num_threads,
    ) -> None:
        """
        Args:
            most: number of threads; by default torch's.
            clock: returns seconds.
            use: sets the number of threads for this thread's calls.
        """
        self._most, self._clock, self._use = most or torch.get_num_threads(), clock, use
        self._chosen = self._now = self._most  # threads: the faster number so far, and that of the next step
        self._size = 0  # bit length of the rows of the measured steps
        self._times: dict[int, list[float]] = {}
        self._since = self._cost = 0.0  # seconds of steps since the last trial, and of the trial

    @contextmanager
    def step(self, rows: int) -> Iterator[None]:
        """Context of a step with this number of rows."""
        if self._most == 1:
            yield
            return
        if rows.bit_length() != self._size:  # times of steps with other sizes are not comparable
            self._size, self._now, self._times = rows.bit_length(), self._chosen, {}
        self._use(self._now)
        begin = self._clock()
        try:
            yield
        finally:
            self._use(self._most)  # the pieces of prompts are large products
        self._note(self._clock() - begin)

    def _note(self, seconds: float) -> None:
        """Starts a trial of the other number when one is due, and ends it with the faster one."""
        self._since += seconds
        times = self._times.setdefault(self._now, [])
        times.append(seconds)
        del times[:-TRIED]
        if len(times) < TRIED:
            return
        if self._now == self._chosen:
            if self._since * SHARE >= self._cost:
                self._now = self._most + 1 - self._chosen
            return
        if min(times) < FASTER * min(self._times[self._chosen]):
            self._chosen = self._now
        self._now, self._times, self._since, self._cost = self._chosen, {}, 0.0, sum(times)
