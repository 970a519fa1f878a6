"""Whether the processes are started again after a failure, and how long is waited before."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.errors import Problem
from stoker.job.schema import FaultsBlock
from stoker.launch.first_failure import Failure, passes_by

AGAIN = 2  # times in a row that a rank ends at the same step before its device is given up


@dataclass(frozen=True)
class Again:
    """A restart: which one without progress in between, and the seconds to wait before it."""

    number: int
    wait: float


class Restarts:
    """Counts the restarts of a run; a step that was never finished before begins the count anew."""

    def __init__(self, faults: FaultsBlock) -> None:
        self.most, self._back_off = faults.restarts, faults.back_off
        self._count, self._furthest = 0, -1
        self._last: tuple[int, str, tuple[Problem, ...]] | None = None
        self._ended_at: list[tuple[int, int]] = []  # rank and step of those that ended or stopped without a word

    def after(self, failure: Failure, *, done: int, steps: int) -> Again | None:
        """What follows from a failure; None where the run ends with it.

        The same exception at the same step is a bug, which would come again.

        Args:
            done: the last step of the run that was finished.
            steps: that were done since the processes were started.
        """
        if not passes_by(failure, steps=steps):
            return None
        here = (done, failure.kind, failure.problems)
        if here == self._last and failure.kind not in ("exit", "hung"):
            return None
        self._last = here
        if failure.kind in ("exit", "hung"):
            self._ended_at.append((failure.rank, done))
        if done > self._furthest:
            self._furthest, self._count = done, 0
        self._count += 1
        if self._count > self.most:
            return None
        return Again(self._count, self._back_off * 2 ** (self._count - 1))

    @property
    def lost(self) -> int | None:
        """The rank that ended, or stopped, without a word at the same step again and again: its device is not well."""
        last = self._ended_at[-AGAIN:]
        return last[0][0] if len(last) == AGAIN and len(set(last)) == 1 else None

    def begin_anew(self) -> None:
        """Other devices train from now on."""
        self._count, self._last = 0, None
        self._ended_at.clear()
