"""Goodput: the cause of every second of a run, from its metrics and events, over all of its starts.

Effective training time is productive step time over wall time, as in Llama 3's report (Grattafiori et al., 2024,
section 3.3.4). The seconds between two records are assigned to the durations in the later one, and the rest to the
phase of the run, so the parts always add up to the wall time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from stoker.json_values import finite_number
from stoker.runs.json_lines import read_lines
from stoker.runs.run_folder import STARTS, RunFolder

Cause = Literal[
    "productive", "data", "checkpoint", "evaluation", "start_up", "recovery", "recomputation", "left_out", "other"
]
DESCRIPTIONS: dict[Cause, str] = {
    "productive": "steps that count",
    "data": "reading samples",
    "checkpoint": "waiting for checkpoints",
    "evaluation": "held-out evaluation",
    "start_up": "starting",
    "recovery": "from faults to the first step after them",
    "recomputation": "steps that were done again",
    "left_out": "steps that were left out",
    "other": "between the steps",
}
LATEST = 253402300800.0  # seconds from 1970 to the year 10,000; larger numbers are no times
ENDS = ("done", "stopped")  # on purpose: the time after them does not count
# The durations in events. That of a checkpoint is in the step after it, or in the end of the run.
TOOK: dict[str, Callable[[dict[str, Any]], dict[Cause, float]]] = {
    "evaluated": lambda event: {"evaluation": finite_number(event.get("seconds")) or 0.0},
    "sampled": lambda _: {"evaluation": math.inf},
    "not_finite": lambda event: {"recomputation": finite_number(event.get("seconds")) or 0.0},
    "done": lambda event: {"checkpoint": finite_number(event.get("stall")) or 0.0},
    "stopped": lambda event: {"checkpoint": finite_number(event.get("stall")) or 0.0},
}
# The events after which training recovers.
FAULTS = ("failed", "interrupted", "fault", "hung", "gpu_fault", "node_lost", "paused", "rolled_back")


@dataclass(frozen=True)
class Goodput:
    """The split of a run's time.

    Attributes:
        wall: seconds from its first start to its newest record, without those in which it was stopped on purpose.
        parts: seconds by cause; they add up to ``wall``.
        first_step: seconds from its first start to the end of its first step.
    """

    wall: float
    parts: dict[Cause, float]
    first_step: float = 0.0

    @property
    def effective(self) -> float:
        """Productive step time over wall time."""
        return self.parts["productive"] / self.wall if self.wall else 0.0


Numbers = NDArray[np.float64]
OF_STEPS = ("time", "seconds", "data_seconds", "stall", "loss", "grad_norm")  # columns that a split is computed from


@dataclass(frozen=True)
class _Steps:
    """The steps of a run in the order of their times, as arrays (steps,).

    Attributes:
        time: end of each step.
        stall, data, work: recorded seconds of waiting for a checkpoint, of waiting for samples, and of computation.
        kind: the index in `KINDS` of the kind of its work.
    """

    time: Numbers
    stall: Numbers
    data: Numbers
    work: Numbers
    kind: NDArray[np.int64]


KINDS: tuple[Cause, ...] = ("productive", "left_out", "recomputation")


@dataclass(frozen=True)
class _Record:
    """An event, and the seconds it took since the record before it, by cause."""

    time: float
    name: str
    took: dict[Cause, float] = field(default_factory=dict)
    began: float | None = None  # of a start: when its process did


def goodput(folder: RunFolder, *, metrics: Mapping[str, Numbers] | None = None) -> Goodput | None:
    """Returns the split of a run's time; None before its first step, or if its metrics have no times.

    Args:
        metrics: the columns `OF_STEPS` of its metrics, if they have been read already; not a number where a line
            has none.
    """
    steps, events = _records(folder, metrics)
    return _split(steps, events) if len(steps.time) else None


class RunningGoodput:
    """The effective training time of a running run over all of its starts; created as a start begins to train."""

    def __init__(self, folder: RunFolder) -> None:
        steps, events = _records(folder, None)
        is_empty = not events and not len(steps.time)
        split = Goodput(0.0, {"productive": 0.0}) if is_empty else _split(steps, events)
        newest = max([*steps.time[-1:], *(event.time for event in events[-1:])], default=time.time())
        self._productive = split.parts["productive"]
        self._begin = newest - split.wall

    def after(self, productive: float) -> float:
        """Returns productive step time over wall time, after a step with these productive seconds."""
        self._productive += productive
        return self._productive / max(time.time() - self._begin, self._productive, 1e-9)


def _split(steps: _Steps, events: Sequence[_Record]) -> Goodput:
    """Returns the split over records sorted by time; at equal times steps precede events."""
    parts: dict[Cause, float] = dict.fromkeys(DESCRIPTIONS, 0.0)
    rest: Cause = "start_up"
    before = np.searchsorted(steps.time, [event.time for event in events], side="right").tolist()
    begin = at = _began(steps, 0, events)
    away, ended, started, done = 0.0, False, False, 0
    for index, until in enumerate([*before, len(steps.time)]):
        if ended and (until > done or index < len(events)):
            begins = max(at, _began(steps, done, events[index:]))
            away, at, rest = away + begins - at, begins, "start_up"
        if until > done:
            at = _add_steps(parts, steps, slice(done, until), at, rest)
            rest, ended, done = "other", False, until
        if index == len(events):
            break
        event = events[index]
        if not ended and (event.name in FAULTS or (event.name in STARTS and started)):
            rest = "recovery"
        left = max(0.0, event.time - at)
        for cause, seconds in event.took.items():
            share = min(left, seconds)
            parts[cause] += share
            left -= share
        parts[rest] += left
        at = max(at, event.time)
        started = started or event.name in STARTS
        ended = event.name in ENDS
    first = float(steps.time[0]) - begin if len(steps.time) else 0.0
    return Goodput(at - begin - away, parts, first)


def _add_steps(parts: dict[Cause, float], steps: _Steps, which: slice, at: float, rest: Cause) -> float:
    """Adds consecutive steps without events, of which the first begins at ``at``; returns the end of the last.

    Args:
        rest: the cause of the seconds before the first step that it does not account for.
    """
    ends = np.maximum.accumulate(np.concatenate([[at], steps.time[which]]))
    left = np.diff(ends)
    waited: tuple[tuple[Cause, Numbers], ...] = (("checkpoint", steps.stall[which]), ("data", steps.data[which]))
    for cause, seconds in waited:
        share = np.minimum(left, seconds)
        parts[cause] += float(share.sum())
        left = left - share
    share = np.minimum(left, steps.work[which])
    for number, kind in enumerate(KINDS):
        parts[kind] += float(share[steps.kind[which] == number].sum())
    left = left - share
    parts[rest] += float(left[0])
    parts["other"] += float(left[1:].sum())
    return float(ends[-1])


def _began(steps: _Steps, done: int, events: Sequence[_Record]) -> float:
    """Returns the time of the first start among the steps from ``done`` on and some events."""
    first = min([*steps.time[done : done + 1], *(event.time for event in events[:1])])
    start = next((event for event in events if event.name in STARTS), None)
    return float(min(first, start.began or start.time) if start is not None else first)


def _records(folder: RunFolder, metrics: Mapping[str, Numbers] | None) -> tuple[_Steps, list[_Record]]:
    """Returns the steps of a run, with repeated ones, and its events; both sorted by time."""
    found = metrics if metrics is not None else _columns(folder.read_metrics())
    each = [_steps(found, repeated=False), _steps(_columns(list(read_lines(folder.repeated))), repeated=True)]
    whole = [np.concatenate(column) for column in zip(*each, strict=True)]
    order = np.argsort(whole[0], kind="stable")
    stamps, stall, data, work, kind = (column[order] for column in whole)
    return _Steps(stamps, stall, data, work, kind.astype(np.int64)), sorted(_events(folder), key=lambda one: one.time)


def _columns(lines: Sequence[Mapping[str, Any]]) -> dict[str, Numbers]:
    """Returns lines of metrics as columns. Lines of earlier versions have fewer fields."""
    return {key: np.array([_number(line.get(key)) for line in lines], dtype=np.float64) for key in OF_STEPS}


def _steps(columns: Mapping[str, Numbers], *, repeated: bool) -> tuple[Numbers, Numbers, Numbers, Numbers, Numbers]:
    """Returns time, stall, data, work and kind of the steps that have a time and a length."""
    ends, seconds, data, stall, loss, grad_norm = (columns[key] for key in OF_STEPS)
    chosen = (ends > 0) & (ends < LATEST) & (repeated | ~np.isnan(seconds))
    ends, seconds = ends[chosen], np.nan_to_num(seconds[chosen])
    is_skipped = np.isnan(loss[chosen]) | np.isnan(grad_norm[chosen])  # not finite, and so null
    data, stall = np.nan_to_num(data[chosen]), np.nan_to_num(stall[chosen])
    if repeated:
        return ends, stall, np.zeros_like(ends), seconds, np.full_like(ends, KINDS.index("recomputation"))
    return ends, stall, data, seconds - data, is_skipped.astype(np.float64)


def _number(value: Any) -> float:
    """Returns a field of a line as a number; NaN for other values."""
    found = finite_number(value)
    return math.nan if found is None else found


def _events(folder: RunFolder) -> Iterator[_Record]:
    for event in folder.read_events():
        name, at = event.get("event"), _number(event.get("time"))
        began = finite_number(event.get("began"))
        if isinstance(name, str) and (name in TOOK or name in (*STARTS, *FAULTS)) and 0 < at < LATEST:
            is_time = began is not None and 0 < began < LATEST
            yield _Record(at, name, TOOK.get(name, lambda _: {})(event), began if is_time else None)
