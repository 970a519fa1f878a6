"""How many threads the products of a step take: all, or one while other work has the cores.

A step of generation is hundreds of small products. Threads that share them spin between two of them, as sleeping costs
more than a product takes. Where other work holds a core, they spin until it is their turn again, and a step takes many
times as long; one thread waits for nobody. Which is faster depends on the moment, so it is measured now and then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

TRIED = 3  # steps of a trial; the fastest one counts
SHARE = 0.05  # of the time at most, for trials
FASTER = 0.95  # a change must be worth it


class StepThreads:
    """Measures steps with all threads and with one, and keeps to the faster.

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
            most: threads; by default those that torch has.
            clock: seconds.
            use: sets the number of threads of what this thread calls.
        """
        self._most, self._clock, self._use = most or torch.get_num_threads(), clock, use
        self._chosen = self._now = self._most  # threads: the faster so far, and of the coming step
        self._size = 0  # of the steps below: the power of two that their rows reach
        self._times: dict[int, list[float]] = {}
        self._since = self._cost = 0.0  # seconds of steps since the last trial, and of its own

    @contextmanager
    def step(self, rows: int) -> Iterator[None]:
        """Encloses a step of so many rows."""
        if self._most == 1:
            yield
            return
        if rows.bit_length() != self._size:  # what other steps took says nothing about these
            self._size, self._now, self._times = rows.bit_length(), self._chosen, {}
        self._use(self._now)
        begin = self._clock()
        try:
            yield
        finally:
            self._use(self._most)  # the pieces of prompts are large products
        self._note(self._clock() - begin)

    def _note(self, seconds: float) -> None:
        """Begins a trial of the other number when one is due, and ends it with the faster one."""
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
