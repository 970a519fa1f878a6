"""Finds hung processes and stragglers from heartbeats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Literal

from stoker.resilience.heartbeat import PHASES, Pulse

TIMES = 10  # as long as the slowest step, before a process counts as hung
LEAST = 120.0  # seconds; steps differ, and a file system may pause
FIRST = 600.0  # seconds before the first step: weights are read, kernels compiled
WAITED_FOR = {"rollouts": 1800.0, "evaluate": 1800.0, "save": 600.0}  # the first of them; later `TIMES` the longest
WINDOW = 20  # steps over which the processes' own times are compared
EXCESS = 0.005  # seconds a step below which a difference is of no account


@dataclass(frozen=True)
class Hung:
    """A hung process.

    Attributes:
        phase, step: of its last heartbeat.
        silent: seconds since then.
    """

    rank: int
    phase: str
    step: int
    silent: float


@dataclass(frozen=True)
class Slow:
    """A straggler: its own work takes longer than that of others with the same part.

    Attributes:
        own: its seconds a step, without waiting; ``median`` those of the processes with the same part.
        first, last: the steps that were compared.
    """

    rank: int
    own: float
    median: float
    first: int
    last: int


def limit(pulse: Pulse, hang: float | Literal["auto"], longest: Mapping[str, float]) -> float:
    """Seconds of silence from which a process counts as hung.

    Args:
        hang: the job's `faults.hang`. It is about steps: what comes before the first one, evaluations and saves have
            at least the limits that they have without it.
        longest: seconds of the longest so far of each phase in `WAITED_FOR`.
    """
    rule = max(LEAST, TIMES * pulse.slowest) if hang == "auto" else hang
    if pulse.phase in WAITED_FOR:
        before = longest.get(pulse.phase)
        return max(rule, TIMES * before if before else WAITED_FOR[pulse.phase])
    return rule if pulse.steps else max(rule, FIRST)


def hung(
    pulses: Mapping[int, Pulse], *, now: float, hang: float | Literal["auto"], longest: Mapping[str, float]
) -> list[Hung]:
    """The processes silent for too long, the probable cause first.

    That is the one that is furthest behind, and among those at the same phase the one that began it first.

    Args:
        now: seconds of the machine's monotonic clock.
        hang, longest: see `limit`.
    """
    silent = [(rank, p) for rank, p in pulses.items() if p.phase != "end" and now - p.beat > limit(p, hang, longest)]
    order = sorted(silent, key=lambda pair: (pair[1].done, pair[1].step, PHASES.index(pair[1].phase), pair[1].beat))
    return [Hung(rank, p.phase, p.step, now - p.beat) for rank, p in order]


class Stragglers:
    """Compares the processes' own time, window by window.

    Args:
        parts: groups of ranks that have the same part of the model, and so the same work.
        slow: how many times the median is slow.
    """

    def __init__(self, parts: Sequence[Sequence[int]], slow: float) -> None:
        self._parts, self._slow = parts, slow
        self._began: dict[int, Pulse] = {}

    def look(self, pulses: Mapping[int, Pulse]) -> list[Slow]:
        """The stragglers of a window that has just ended; call it repeatedly."""
        if any(rank not in pulses for part in self._parts for rank in part):
            return []
        if not self._began:
            if all(pulse.steps for pulse in pulses.values()):  # the first step has work of its own
                self._began = dict(pulses)
            return []
        if any(pulses[rank].steps - began.steps < WINDOW for rank, began in self._began.items()):
            return []
        own = {
            rank: (pulses[rank].own - began.own) / (pulses[rank].steps - began.steps)
            for rank, began in self._began.items()
        }
        first, last = min(p.done for p in self._began.values()) + 1, max(p.done for p in pulses.values())
        self._began = dict(pulses)
        found = []
        for part in self._parts:
            median = median_low(own[rank] for rank in part)
            found += [
                Slow(rank, own[rank], median, first, last)
                for rank in part
                if own[rank] > self._slow * median and own[rank] - median > EXCESS
            ]
        return found
