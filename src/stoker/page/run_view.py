"""What the page shows of a run: a summary for lists, and the whole with the state of its health."""

from __future__ import annotations

import json
import math
import shlex
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from stoker.errors import UserError
from stoker.files import read_file
from stoker.job.key_paths import flat
from stoker.job.task_spec import TASKS
from stoker.job.yaml_document import parse_document
from stoker.page.masked import masked
from stoker.page.metric_series import SeriesCache
from stoker.page.metric_tail import newest_lines
from stoker.page.run_index import id_of, is_run_file
from stoker.page.stage_views import parents_of, stages_of
from stoker.runs.goodput import Goodput, goodput
from stoker.runs.listing import state_of
from stoker.runs.plan_comparison import read_comparison
from stoker.runs.run_folder import RunFolder

SPLIT_SECONDS = 3.0  # for which a split counts; reading one takes a second for 200,000 steps
RECENT = 50  # steps whose median speed the time left is computed from
SLOW, VERY_SLOW = 1.25, 2.0  # measured over predicted step time; of catalogue figures nothing is said
FULL, OVER = 0.92, 1.0  # of the memory that the plan allows at most
GOOD, POOR = 0.85, 0.5  # productive share of the wall time
YOUNG = 120.0  # seconds of a run within which starting up weighs too much to be judged
LOST, MANY_LOST = 0.01, 0.1  # share of rows dropped
FAULTS = ("fault", "hung", "node_lost", "rolled_back", "spike", "not_finite", "skipped", "alarm", "interrupted")
Level = Literal["ok", "warn", "bad"]


@dataclass(frozen=True)
class Health:
    """The state of one side of a run.

    Attributes:
        what: ``data``, ``memory``, ``speed``, ``goodput`` or ``faults``.
        value: the numbers that it is judged by, in the units that their names say.
        key: of the message, for the page's table of messages.
    """

    what: str
    level: Level
    value: Mapping[str, float | None]
    key: str


class RunViews:
    """Summaries of runs; what a file says is read again when the file has changed."""

    def __init__(self, series: SeriesCache) -> None:
        self.series = series
        self._events: dict[Path, tuple[tuple[int, int], list[dict[str, Any]]]] = {}
        self._splits: dict[Path, tuple[float, float, Goodput | None]] = {}  # when, seconds that it took, what

    def events(self, folder: RunFolder) -> list[dict[str, Any]]:
        """All events of a run."""
        try:
            found = folder.events.stat()
        except OSError:
            return []
        key = found.st_mtime_ns, found.st_size
        kept = self._events.get(folder.path)
        if kept is None or kept[0] != key:
            kept = self._events[folder.path] = key, folder.read_events()
        return kept[1]

    def short_events(self, folder: RunFolder) -> list[dict[str, Any]]:
        """The events of a run, without long tables."""
        return [short_event(each) for each in self.events(folder)]

    def samples(self, folder: RunFolder) -> list[dict[str, Any]]:
        """The answers to held-out prompts at each step that has some."""
        found = [each for each in self.events(folder) if each.get("event") == "sampled"]
        return [{"step": each.get("step"), "samples": each.get("samples", [])} for each in found]

    def summary(self, folder: RunFolder) -> dict[str, Any]:
        """A run at a glance."""
        events = self.events(folder)
        begun = [event for event in events if event.get("event") in ("started", "resumed")]
        started = begun[-1] if begun else {}
        held_out = next((e.get("loss") for e in reversed(events) if e.get("event") == "evaluated"), None)
        newest = newest_lines(folder.metrics, RECENT)
        last = newest[-1] if newest else {}
        step, steps = _whole(last.get("step")), _whole(started.get("steps"))
        status = state_of(folder, events)
        seconds = [found for line in newest if (found := _number(line.get("seconds"))) is not None]
        speed = float(np.median(seconds)) if seconds else None
        return {
            "id": id_of(folder.path),
            "name": folder.path.name,
            "folder": str(folder.path),
            "status": status,
            "task": str(started.get("task", "")),
            "model": masked(str(started.get("model", ""))),
            "step": step,
            "steps": steps,
            "loss": _number(last.get("loss")),
            "held_out_loss": held_out,
            "seconds_left": (steps - step) * speed if status == "running" and speed is not None and steps else None,
            "started": begun[0].get("time") if begun else None,
            "updated": max((p.stat().st_mtime for p in (folder.events, folder.metrics) if p.exists()), default=None),
            "parents": parents_of(folder),
        }

    def detail(self, folder: RunFolder) -> dict[str, Any]:
        """All of a run but its long tables."""
        comparison = read_comparison(folder)
        environment = _json(folder.environment)
        command = environment.get("command") or []
        words = [str(word) for word in command[1:]] if isinstance(command, list) else []
        split = self.goodput(folder)
        found = {
            **self.summary(folder),
            "job": job_text(folder),
            "keys": {key: str(value) for key, value in flat(job_values(folder)).items()},
            "formats": _formats(folder),
            "command": shlex.join(["stoker", *words]) if words else f"stoker train {shlex.quote(str(folder.job))}",
            "health": [asdict(each) for each in self.health(folder)],
            "stages": stages_of(folder, self.events),
            "lineage": _json(folder.lineage) or None,
            "environment": environment,
            "plan": comparison and {**asdict(comparison), "line": comparison.line()},
            "goodput": split and {"wall": split.wall, "parts": split.parts, "effective": split.effective},
            "metrics": self.series.of(folder.metrics).keys(),
        }
        return {key: masked(value) for key, value in found.items()}

    def health(self, folder: RunFolder) -> list[Health]:
        """The sides of a run that a person looks at, each with a level."""
        events, split = self.events(folder), self.goodput(folder)
        found = [
            _data(events),
            _memory(folder, self.series),
            _speed(folder, self.series),
            _goodput(split),
            _faults(events),
        ]
        return [each for each in found if each is not None]

    def goodput(self, folder: RunFolder) -> Goodput | None:
        """The split of a run's time, as it was some seconds ago at most."""
        kept = self._splits.get(folder.path)
        if kept is None or time.monotonic() - kept[0] > max(SPLIT_SECONDS, 20 * kept[1]):
            begin = time.monotonic()
            split = goodput(folder)
            kept = self._splits[folder.path] = time.monotonic(), time.monotonic() - begin, split
        return kept[2]


def short_event(values: dict[str, Any]) -> dict[str, Any]:
    """An event without what has an address of its own."""
    return {key: masked(value) for key, value in values.items() if key not in ("samples", "rows")}


def job_text(folder: RunFolder) -> str:
    """The run's ``job.yaml``; empty where it has none."""
    try:
        return read_file(folder.job).decode("utf-8", "replace") if is_run_file(folder.job) else ""
    except OSError:
        return ""


def job_values(folder: RunFolder) -> Any:
    """The same as data; an empty mapping where it cannot be read."""
    try:
        return parse_document(job_text(folder), file="job.yaml").data or {}
    except UserError:
        return {}


def _data(events: list[dict[str, Any]]) -> Health | None:
    started = next((e for e in reversed(events) if e.get("event") in ("started", "resumed") and "sources" in e), None)
    if started is None:
        return None
    audit = started.get("audit")
    if not isinstance(audit, dict):  # of an earlier version
        return None
    found = {name: _number(audit.get(f"rows_{name}")) or 0 for name in ("in", "used", "cut", "dropped")}
    share = found["dropped"] / found["in"] if found["in"] else 0.0
    level: Level = "bad" if share > MANY_LOST else "warn" if share > LOST else "ok"
    values = {"rows": found["in"], **{name: found[name] for name in ("used", "cut", "dropped")}}
    values["tokens"] = _number(audit.get("tokens")) or 0
    return Health("data", level, values, f"health.data.{level}")


def _memory(folder: RunFolder, series: SeriesCache) -> Health | None:
    comparison = read_comparison(folder)
    used = series.of(folder.metrics).column("memory_gib")
    used = used[np.isfinite(used)]
    if not len(used):
        return None
    most = float(used.max())
    if comparison is None or comparison.predicted is None:
        return Health(
            "memory", "ok", {"used_gib": most, "planned_gib": None, "most_gib": None}, "health.memory.unplanned"
        )
    planned, upper = comparison.predicted.peak / 2**30, comparison.predicted.upper / 2**30
    level: Level = "warn" if most > OVER * upper else "ok"
    return Health(
        "memory", level, {"used_gib": most, "planned_gib": planned, "most_gib": upper}, f"health.memory.{level}"
    )


def _speed(folder: RunFolder, series: SeriesCache) -> Health | None:
    comparison = read_comparison(folder)
    lines = series.of(folder.metrics)
    seconds = lines.column("seconds")
    settled = seconds[2:][-RECENT:] if len(seconds) > 2 else seconds
    settled = settled[np.isfinite(settled)]
    if not len(settled):
        return None
    measured = float(np.median(settled))
    tokens = lines.column("tokens_per_s")[-RECENT:]
    rate = float(np.nanmedian(tokens)) if np.isfinite(tokens).any() else None
    planned, level, key = None, "ok", "health.speed.unplanned"
    found = comparison.predicted if comparison is not None else None
    if found is not None and (found.calibration is not None or found.corrected_by is not None):
        planned = found.seconds
        ratio = measured / planned if planned else 1.0
        level = "bad" if ratio > VERY_SLOW else "warn" if ratio > SLOW else "ok"
        key = f"health.speed.{level}"
    return Health("speed", level, {"seconds": measured, "planned_seconds": planned, "tokens_per_s": rate}, key)  # type: ignore[arg-type]


def _goodput(split: Goodput | None) -> Health | None:
    if split is None:
        return None
    if split.wall < YOUNG:
        return Health(
            "goodput", "ok", {"effective": split.effective, "wall_seconds": split.wall}, "health.goodput.young"
        )
    level: Level = "bad" if split.effective < POOR else "warn" if split.effective < GOOD else "ok"
    return Health(
        "goodput", level, {"effective": split.effective, "wall_seconds": split.wall}, f"health.goodput.{level}"
    )


def _faults(events: list[dict[str, Any]]) -> Health:
    counts = Counter(str(event.get("event")) for event in events if event.get("event") in FAULTS)
    last = next(
        (str(e.get("event")) for e in reversed(events) if e.get("event") in ("failed", "started", "resumed")), ""
    )
    level: Level = "bad" if last == "failed" else "warn" if counts else "ok"
    return Health(
        "faults", level, dict(counts), "health.faults.failed" if last == "failed" else f"health.faults.{level}"
    )


def _formats(folder: RunFolder) -> list[str]:
    """The formats that a run can be exported in."""
    values = job_values(folder)
    task = TASKS.get(str(values.get("task"))) if isinstance(values, dict) else None
    return list(task.exports) if task else []


def _whole(value: Any) -> int:
    found = _number(value)
    return int(found) if found is not None else 0


def _number(value: Any) -> float | None:
    """What is a finite number; None for anything else that a file may have in its place."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else None


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_file(path)) if is_run_file(path) else {}
        return found if isinstance(found, dict) else {}
    except (OSError, ValueError):
        return {}
