"""Detection of hung processes and stragglers from heartbeats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Literal

from stoker.resilience.heartbeat import PHASES, Pulse

TIMES = 10  # multiple of the slowest step after which a process counts as hung
LEAST = 120.0  # seconds; steps vary, and a file system may pause
FIRST = 600.0  # seconds before the first step: weights are read, kernels compiled
WAITED_FOR = {"rollouts": 1800.0, "evaluate": 1800.0, "save": 600.0}  # seconds, at least
WINDOW = 20  # steps over which the processes' own times are compared
EXCESS = 0.005  # differences per step below this are ignored, seconds


@dataclass(frozen=True)
class Hung:
    """A hung process.

    Attributes:
        phase, step: phase and step of its last heartbeat.
        silent: seconds since then.
    """

    rank: int
    phase: str
    step: int
    silent: float


@dataclass(frozen=True)
class Slow:
    """A straggler: its own work takes longer than that of processes with the same part of the model.

    Attributes:
        own: its seconds per step, without waiting; ``median`` is that of the processes with the same part.
        first, last: range of the compared steps.
    """

    rank: int
    own: float
    median: float
    first: int
    last: int


def hang_timeout(pulse: Pulse, hang: float | Literal["auto"], longest: Mapping[str, float]) -> float:
    """Returns the seconds of silence after which a process counts as hung.

    Args:
        hang: the job's `faults.hang`. It applies to steps: setup, evaluations and saves have at least their default
            limits.
        longest: duration of the longest of each phase in `WAITED_FOR` so far, seconds.
    """
    rule = max(LEAST, TIMES * pulse.slowest) if hang == "auto" else hang
    if pulse.phase in WAITED_FOR:
        return max(rule, WAITED_FOR[pulse.phase], TIMES * longest.get(pulse.phase, 0.0))
    return rule if pulse.steps else max(rule, FIRST)


def hung(
    pulses: Mapping[int, Pulse], *, now: float, hang: float | Literal["auto"], longest: Mapping[str, float]
) -> list[Hung]:
    """Returns the processes that are silent for too long, the probable cause first.

    The probable cause is the process that is furthest behind; at equal progress, the one whose phase began first.
    """
    least = LEAST if hang == "auto" else hang  # of all limits; most processes are below it
    late = [(rank, p) for rank, p in pulses.items() if now - p.beat > least and p.phase != "end"]
    silent = [(rank, p) for rank, p in late if now - p.beat > hang_timeout(p, hang, longest)]
    order = sorted(silent, key=lambda pair: (pair[1].done, pair[1].step, PHASES.index(pair[1].phase), pair[1].beat))
    return [Hung(rank, p.phase, p.step, now - p.beat) for rank, p in order]


class Stragglers:
    """Compares the processes' own times, window by window.

    Args:
        parts: groups of ranks with the same part of the model, and so the same work.
        slow: multiple of the median that counts as slow.
    """

    def __init__(self, parts: Sequence[Sequence[int]], slow: float) -> None:
        self._parts, self._slow = parts, slow
        self._ranks = frozenset(rank for part in parts for rank in part)
        self._began: dict[int, Pulse] = {}

    def look(self, pulses: Mapping[int, Pulse]) -> list[Slow]:
        """Returns the stragglers of a window that has just ended; to be called repeatedly."""
        if not self._ranks <= pulses.keys():
            return []
        if not self._began:
            if all(pulse.steps for pulse in pulses.values()):  # the first step has extra work
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
