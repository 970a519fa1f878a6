"""Goodput: the cause of every second of a run, from its metrics and events, over all of its starts.

Effective training time is productive step time over wall time, as in Llama 3's report (Grattafiori et al., 2024,
section 3.3.4). The seconds between two records are assigned to the durations in the later one, and the rest to the
phase of the run, so the parts always add up to the wall time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from stoker.runs.run_folder import RunFolder, read_lines

Cause = Literal[
    "productive", "data", "checkpoint", "evaluation", "start_up", "recovery", "recomputation", "left_out", "other"
]
WORDS: dict[Cause, str] = {
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
STARTS = ("started", "resumed")
ENDS = ("done", "stopped")  # on purpose: the time after them does not count
# The durations in events. That of a checkpoint is in the step after it, or in the end of the run.
TOOK: dict[str, Callable[[dict[str, Any]], dict[Cause, float]]] = {
    "evaluated": lambda event: {"evaluation": event.get("seconds", 0.0)},
    "sampled": lambda _: {"evaluation": math.inf},
    "not_finite": lambda event: {"recomputation": event.get("seconds", 0.0)},
    "done": lambda event: {"checkpoint": event.get("stall", 0.0)},
    "stopped": lambda event: {"checkpoint": event.get("stall", 0.0)},
}
FAULTS = (
    "failed",
    "interrupted",
    "fault",
    "hung",
    "node_lost",
    "paused",
    "rolled_back",
)  # after which training recovers


@dataclass(frozen=True)
class Goodput:
    """The split of a run's time.

    Attributes:
        wall: seconds from its first start to its newest record, without those in which it was stopped on purpose.
        parts: seconds by cause; they add up to ``wall``.
    """

    wall: float
    parts: dict[Cause, float]

    @property
    def effective(self) -> float:
        """Productive step time over wall time."""
        return self.parts["productive"] / self.wall if self.wall else 0.0


@dataclass(frozen=True)
class _Record:
    """Something that ended at a time, and the seconds it took since the previous record, by cause."""

    time: float
    name: str
    took: dict[Cause, float] = field(default_factory=dict)
    began: float | None = None  # of a start: when its process did


def goodput(folder: RunFolder) -> Goodput | None:
    """The split of a run's time; None where it has done no step yet, or its metrics bear no times."""
    records = sorted(_records(folder), key=lambda record: record.time)
    return _split(records) if any(record.name == "step" for record in records) else None


class Running:
    """The effective training time of a running run over all of its starts; created as a start begins to train."""

    def __init__(self, folder: RunFolder) -> None:
        records = sorted(_records(folder), key=lambda record: record.time)
        split = _split(records) if records else Goodput(0.0, {"productive": 0.0})
        self._productive = split.parts["productive"]
        self._begin = (records[-1].time if records else time.time()) - split.wall

    def after(self, productive: float) -> float:
        """Productive step time over wall time, after a step with these productive seconds."""
        self._productive += productive
        return self._productive / max(time.time() - self._begin, self._productive, 1e-9)


def _split(records: Sequence[_Record]) -> Goodput:
    parts: dict[Cause, float] = dict.fromkeys(WORDS, 0.0)
    rest: Cause = "start_up"
    begin = at = _began(records)
    away, ended, started = 0.0, False, False
    for index, record in enumerate(records):
        if ended:
            begins = max(at, _began(records[index:]))
            away, at, rest, ended = away + begins - at, begins, "start_up", False
        elif record.name in FAULTS or (record.name in STARTS and started):
            rest = "recovery"
        left = max(0.0, record.time - at)
        for cause, seconds in record.took.items():
            share = min(left, seconds)
            parts[cause] += share
            left -= share
        parts[rest] += left
        at = max(at, record.time)
        started = started or record.name in STARTS
        ended = record.name in ENDS
        if record.name == "step":
            rest = "other"
    return Goodput(at - begin - away, parts)


def _began(records: Sequence[_Record]) -> float:
    """The time of the first start among records."""
    start = next((record for record in records if record.name in STARTS), records[0])
    return min(records[0].time, start.began or start.time)


def _records(folder: RunFolder) -> Iterator[_Record]:
    for line in folder.read_metrics():
        if _is_time(line.get("time")) and line.get("seconds") is not None:
            yield _step(line)
    for line in read_lines(folder.repeated):
        if _is_time(line.get("time")):
            took: dict[Cause, float] = {"checkpoint": line.get("stall", 0.0), "recomputation": line.get("seconds", 0.0)}
            yield _Record(line["time"], "step", took)
    for event in folder.read_events():
        name = event.get("event", "")
        if (name in TOOK or name in (*STARTS, *FAULTS)) and _is_time(event.get("time")):
            yield _Record(event["time"], name, TOOK.get(name, lambda _: {})(event), event.get("began"))


def _is_time(value: Any) -> bool:
    """Whether a record has a time; one that is spoilt, or of an earlier version, may have none."""
    return isinstance(value, int | float) and value > 0


def _step(line: dict[str, Any]) -> _Record:
    # Lines of earlier versions have fewer fields.
    waited = line.get("data_seconds", 0.0)
    kind: Cause = "productive" if line.get("loss") is not None else "left_out"
    took: dict[Cause, float] = {"checkpoint": line.get("stall", 0.0), "data": waited, kind: line["seconds"] - waited}
    return _Record(line["time"], "step", took)
