"""Decides whether processes are restarted after a failure, and the delay before it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from stoker.errors import Problem
from stoker.job.blocks.faults_block import FaultsBlock
from stoker.launch.first_failure import Failure, passes_by

AGAIN = 2  # times in a row that a rank ends at the same step before its device is given up


@dataclass(frozen=True)
class Again:
    """A restart: its number since the last progress, and the seconds to wait before it."""

    number: int
    wait: float


class Restarts:
    """Counts restarts; a step that had never been finished before resets the count.

    Attributes:
        furthest: the last step that was done when something broke; -1 before the first.
    """

    def __init__(self, faults: FaultsBlock) -> None:
        self.most, self._back_off = faults.restarts, faults.back_off
        self._count = 0
        self.furthest = -1
        self._last: tuple[int, str, tuple[Problem, ...]] | None = None
        self._ended_at: list[tuple[int, int]] = []  # rank and step of processes that ended without a report

    def after(self, failure: Failure, *, done: int, steps: int) -> Again | None:
        """Returns the restart after a failure; None if the run ends.

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
        if done > self.furthest:
            self.furthest, self._count = done, 0
        self._count += 1
        if self._count > self.most:
            return None
        return Again(self._count, self._back_off * 2 ** (self._count - 1))

    @property
    def lost(self) -> int | None:
        """The rank that repeatedly ended or hung at the same step without an error: its device is taken for broken."""
        last = self._ended_at[-AGAIN:]
        return last[0][0] if len(last) == AGAIN and len(set(last)) == 1 else None

    def reset(self) -> None:
        """Resets the count, as other devices train from now on."""
        self._count, self._last = 0, None
        self._ended_at.clear()

    def state(self) -> dict[str, Any]:
        """Returns the state with which another supervisor continues the counts."""
        step, kind, problems = self._last or (None, "", ())
        last = None if step is None else [step, kind, [asdict(problem) for problem in problems]]
        return {"count": self._count, "furthest": self.furthest, "last": last, "ended_at": self._ended_at}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores the state that `state` returned."""
        self._count, self.furthest = int(state["count"]), int(state["furthest"])
        self._ended_at = [(int(rank), int(step)) for rank, step in state["ended_at"]]
        self._last = None
        if state["last"] is not None:
            step, kind, problems = state["last"]
            self._last = step, kind, tuple(Problem(**problem) for problem in problems)
