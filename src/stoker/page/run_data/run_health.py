"""Rates the health of a run: its data, learning, memory, speed, use of time and faults, each with a level."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from stoker.json_values import finite_number
from stoker.page.run_data.metric_series import MetricSeries
from stoker.page.run_data.run_index import is_run_file
from stoker.runs.goodput import Cause, Goodput
from stoker.runs.listing import state_of
from stoker.runs.plan_record import Predicted, read_comparison
from stoker.runs.run_folder import ENDS, STARTS, RunFolder

RECENT = 50  # steps that the median speed is computed over
SLOW, VERY_SLOW = 1.25, 2.0  # measured over predicted step time; catalogue figures are not rated
OVER = 1.0  # fraction of the plan's upper bound of memory
SOME, MOST = 0.15, 0.5  # share of the wall time that faults and waits took
YOUNG = 120.0  # seconds of a run within which one wait weighs too much to be judged
SPENT: tuple[Cause, ...] = ("productive", "start_up", "evaluation")  # causes of which every run has a part
FEW = 5  # a run of no more steps is not rated bad if none of them has changed anything
LOST, MANY_LOST = 0.01, 0.1  # share of rows dropped
FAULTS = (
    "fault",
    "hung",
    "gpu_fault",
    "node_lost",
    "rolled_back",
    "spike",
    "not_finite",
    "skipped",
    "alarm",
    "interrupted",
)
KILLED = "health.faults.interrupted"
Level = Literal["ok", "warn", "bad"]


@dataclass(frozen=True)
class Health:
    """The health of one aspect of a run.

    Attributes:
        what: ``data``, ``metrics``, ``learning``, ``memory``, ``speed``, ``goodput`` or ``faults``.
        value: the numbers behind the level, in the units that their names give.
        key: of the message, in the page's table of messages.
    """

    what: str
    level: Level
    value: Mapping[str, float | None]
    key: str


def health_of(
    folder: RunFolder, events: list[dict[str, Any]], split: Goodput | None, lines: MetricSeries
) -> list[Health]:
    """Returns the aspects of a run's health."""
    comparison = read_comparison(folder)
    predicted = None if comparison is None else comparison.predicted
    found = [
        _data(events),
        _metrics(folder),
        _learning(lines),
        _memory(predicted, lines),
        _speed(predicted, lines),
        _goodput(split),
        _faults(folder, events),
    ]
    return [each for each in found if each is not None]


def _data(events: list[dict[str, Any]]) -> Health | None:
    started = next((e for e in reversed(events) if e.get("event") in ("started", "resumed") and "sources" in e), None)
    if started is None:
        return None
    audit = started.get("audit")
    if not isinstance(audit, dict):  # of an earlier version
        return None
    found = {name: finite_number(audit.get(f"rows_{name}")) or 0 for name in ("in", "used", "cut", "dropped")}
    share = found["dropped"] / found["in"] if found["in"] else 0.0
    level: Level = "bad" if share > MANY_LOST else "warn" if share > LOST else "ok"
    values = {"rows": found["in"], **{name: found[name] for name in ("used", "cut", "dropped")}}
    values["tokens"] = finite_number(audit.get("tokens")) or 0
    return Health("data", level, values, f"health.data.{level}")


def _metrics(folder: RunFolder) -> Health | None:
    return None if has_sound_metrics(folder) else Health("metrics", "bad", {}, "health.metrics.unreadable")


def has_sound_metrics(folder: RunFolder) -> bool:
    """Returns whether the metrics are a file that can be read, or do not exist yet."""
    return not os.path.lexists(folder.metrics) or is_run_file(folder.metrics)


def _learning(lines: MetricSeries) -> Health | None:
    """Rates recent steps that all change nothing: no compared answers differ in score, or the gradient is 0."""
    for name in ("informative", "grad_norm"):
        values = lines.column(name)
        values = values[np.isfinite(values)]
        if len(values) and not values[-RECENT:].any():
            idle = len(values) - (int(np.flatnonzero(values)[-1]) + 1 if values.any() else 0)
            level: Level = "bad" if idle == len(values) > FEW else "warn"
            return Health("learning", level, {"steps": idle}, f"health.learning.{name}")
    return None


def _memory(predicted: Predicted | None, lines: MetricSeries) -> Health | None:
    used = lines.column("memory_gib")
    used = used[np.isfinite(used)]
    if not len(used):
        return None
    most = float(used.max())
    if predicted is None:
        return Health(
            "memory", "ok", {"used_gib": most, "planned_gib": None, "most_gib": None}, "health.memory.unplanned"
        )
    planned, upper = predicted.peak / 2**30, predicted.upper / 2**30
    level: Level = "warn" if most > OVER * upper else "ok"
    return Health(
        "memory", level, {"used_gib": most, "planned_gib": planned, "most_gib": upper}, f"health.memory.{level}"
    )


def _speed(predicted: Predicted | None, lines: MetricSeries) -> Health | None:
    seconds = lines.column("seconds")
    settled = seconds[2:][-RECENT:] if len(seconds) > 2 else seconds
    settled = settled[np.isfinite(settled)]
    if not len(settled):
        return None
    measured = float(np.median(settled))
    tokens = lines.column("tokens_per_s")[-RECENT:]
    rate = float(np.nanmedian(tokens)) if np.isfinite(tokens).any() else None
    planned: float | None = None
    level: Level = "ok"
    key = "health.speed.unplanned"
    if predicted is not None and (predicted.calibration is not None or predicted.corrected_by is not None):
        planned = predicted.seconds
        ratio = measured / planned if planned else 1.0
        level = "bad" if ratio > VERY_SLOW else "warn" if ratio > SLOW else "ok"
        key = f"health.speed.{level}"
    return Health("speed", level, {"seconds": measured, "planned_seconds": planned, "tokens_per_s": rate}, key)


def _goodput(split: Goodput | None) -> Health | None:
    if split is None:
        return None
    lost = 1 - sum(split.parts[cause] for cause in SPENT) / split.wall if split.wall else 0.0
    values = {"effective": split.effective, "lost": max(0.0, lost), "wall_seconds": split.wall}
    if split.wall < YOUNG:
        return Health("goodput", "ok", values, "health.goodput.young")
    level: Level = "bad" if lost > MOST else "warn" if lost > SOME else "ok"
    return Health("goodput", level, values, f"health.goodput.{level}")


def _faults(folder: RunFolder, events: list[dict[str, Any]]) -> Health:
    counts = Counter(str(event.get("event")) for event in events if event.get("event") in FAULTS)
    last = next((str(e.get("event")) for e in reversed(events) if e.get("event") in (*STARTS, "failed")), "")
    if last == "failed":
        return Health("faults", "bad", dict(counts), "health.faults.failed")
    end = next((e.get("event") for e in reversed(events) if e.get("event") in ENDS), "")
    if end != "interrupted" and state_of(folder, events) == "interrupted":  # no event says so
        return Health("faults", "warn", dict(counts), KILLED)
    level: Level = "warn" if counts else "ok"
    return Health("faults", level, dict(counts), f"health.faults.{level}")
