"""The page's view of a run: a summary for lists, and the details with the levels of its health."""

from __future__ import annotations

import shlex
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from stoker.errors import UserError
from stoker.files import read_file
from stoker.job.document.job_to_yaml import scalar
from stoker.job.document.text_file import read_text
from stoker.job.document.yaml_document import parse_document
from stoker.job.keys.key_paths import flat
from stoker.job.task_spec import TASKS
from stoker.json_values import finite_number, json_or_none, whole_number
from stoker.page.access.mask_secrets import mask_secrets
from stoker.page.page_error import page_problem
from stoker.page.run_data.metric_series import SeriesCache
from stoker.page.run_data.metric_tail import newest_lines
from stoker.page.run_data.run_health import RECENT, Health, has_sound_metrics, health_of
from stoker.page.run_data.run_index import id_of, is_run_file
from stoker.page.run_data.stage_views import parents_of, stages_of
from stoker.runs.goodput import OF_STEPS, Goodput, goodput
from stoker.runs.listing import state_of
from stoker.runs.plan_record import read_comparison
from stoker.runs.run_folder import RunFolder

SPLIT_SECONDS = 3.0  # for which a split counts; one takes 20 ms for 200,000 steps
Stamp = tuple[int, int] | None


class RunViews:
    """Summaries of runs; a file is read again only if it has changed."""

    def __init__(self, series: SeriesCache) -> None:
        self.series = series
        self._events: dict[Path, tuple[Stamp, list[dict[str, Any]]]] = {}
        self._glances: dict[Path, tuple[tuple[Stamp, Stamp], dict[str, Any]]] = {}
        self._jobs: dict[Path, tuple[Stamp, Any]] = {}
        self._splits: dict[Path, tuple[float, float, Goodput | None]] = {}  # time, seconds of the computation, result

    def events(self, folder: RunFolder) -> list[dict[str, Any]]:
        """Returns all events of a run."""
        key = _stamp(folder.events)
        if key is None:
            return []
        kept = self._events.get(folder.path)
        if kept is None or kept[0] != key:
            kept = self._events[folder.path] = key, folder.read_events()
        return kept[1]

    def short_events(self, folder: RunFolder) -> list[dict[str, Any]]:
        """Returns the events of a run, without long tables."""
        return [short_event(each) for each in self.events(folder)]

    def samples(self, folder: RunFolder) -> list[dict[str, Any]]:
        """Returns the answers to held-out prompts at each step that has some."""
        found = [each for each in self.events(folder) if each.get("event") == "sampled"]
        return [{"step": each.get("step"), "samples": each.get("samples", [])} for each in found]

    def summary(self, folder: RunFolder) -> dict[str, Any]:
        """Returns a run's summary; its files are read again only if one of them has changed."""
        events = self.events(folder)
        stamps = _stamp(folder.events), _stamp(folder.metrics)
        kept = self._glances.get(folder.path)
        if kept is None or kept[0] != stamps:
            kept = self._glances[folder.path] = stamps, _glance(folder, events)
        found = dict(kept[1])
        status = state_of(folder, events) if has_sound_metrics(folder) else "unreadable"
        step, steps, speed = found["step"], found["steps"], found.pop("speed")
        left = (steps - step) * speed if status == "running" and speed is not None and steps else None
        return {**found, "status": status, "seconds_left": left, "parents": parents_of(folder)}

    def detail(self, folder: RunFolder) -> dict[str, Any]:
        """Returns all of a run except its long tables."""
        comparison = read_comparison(folder)
        environment = _json(folder.environment)
        command = environment.get("command") or []
        words = [str(word) for word in command[1:]] if isinstance(command, list) else []
        split, values = self.goodput(folder), self._job_values(folder)
        found = {
            **self.summary(folder),
            "job": job_text(folder),
            "keys": {key: scalar(value) for key, value in flat(values).items()},
            "formats": _formats(values),
            "command": shlex.join(["stoker", *words]) if words else f"stoker train {shlex.quote(str(folder.job))}",
            "health": [asdict(each) for each in self.health(folder)],
            "stages": stages_of(folder, self.events),
            "lineage": _json(folder.lineage) or None,
            "environment": environment,
            "plan": comparison and {**asdict(comparison), "line": comparison.line()},
            "goodput": split and {"wall": split.wall, "parts": split.parts, "effective": split.effective},
            "metrics": self.series.of(folder.metrics).keys(),
        }
        return {key: mask_secrets(value) for key, value in found.items()}

    def _job_values(self, folder: RunFolder) -> Any:
        """Returns the run's job as data, read again when it has changed."""
        stamp = _stamp(folder.job)
        kept = self._jobs.get(folder.path)
        if kept is None or kept[0] != stamp:
            kept = self._jobs[folder.path] = stamp, job_values(folder)
        return kept[1]

    def health(self, folder: RunFolder) -> list[Health]:
        """Returns the aspects of a run's health, each with a level."""
        return health_of(folder, self.events(folder), self.goodput(folder), self.series.of(folder.metrics))

    def goodput(self, folder: RunFolder) -> Goodput | None:
        """Returns the split of a run's time, cached for some seconds."""
        kept = self._splits.get(folder.path)
        if kept is None or time.monotonic() - kept[0] > max(SPLIT_SECONDS, 20 * kept[1]):
            begin = time.monotonic()
            lines = self.series.of(folder.metrics)
            split = goodput(folder, metrics=lines.columns(OF_STEPS))
            kept = self._splits[folder.path] = time.monotonic(), time.monotonic() - begin, split
        return kept[2]


def _stamp(path: Path) -> Stamp:
    """Returns a file's modification time and size, by which a change is detected; None if it does not exist."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def _glance(folder: RunFolder, events: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the summary from the run's files; ``speed`` is the median of its newest steps, in seconds."""
    begun = [event for event in events if event.get("event") in ("started", "resumed")]
    started = begun[-1] if begun else {}
    evaluated: dict[str, Any] = next((event for event in reversed(events) if event.get("event") == "evaluated"), {})
    saved = newest_saved(events)
    newest = newest_lines(folder.metrics, RECENT)
    last = newest[-1] if newest else {}
    seconds = [found for line in newest if (found := finite_number(line.get("seconds"))) is not None]
    return {
        "id": id_of(folder.path),
        "name": folder.path.name,
        "folder": str(folder.path),
        "task": str(started.get("task", "")),
        "model": mask_secrets(str(started.get("model", ""))),
        "step": whole_number(last.get("step")),
        "steps": whole_number(started.get("steps")),
        "saved": None if saved is None else whole_number(saved.get("step")),
        "loss": finite_number(last.get("loss")),
        "held_out_loss": finite_number(evaluated.get("loss")),
        "started": finite_number(begun[0].get("time")) if begun else None,
        "updated": folder.updated(),
        "speed": float(np.median(seconds)) if seconds else None,
    }


def newest_saved(events: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Returns the event of a run's newest checkpoint on disk; None without."""
    return next((e for e in reversed(events) if e.get("event") == "saved" and e.get("where") != "memory"), None)


def short_event(values: dict[str, Any]) -> dict[str, Any]:
    """Returns an event without its parts that have routes of their own."""
    return {key: mask_secrets(value) for key, value in values.items() if key not in ("samples", "rows")}


def read_job(folder: RunFolder) -> str:
    """Reads the run's ``job.yaml``.

    Raises:
        UserError: it is missing, a link, or no text file.
    """
    if folder.job.is_symlink():
        raise UserError(page_problem("the run's {name} is a link, not a file", name=folder.job.name))
    return read_text(folder.job)


def job_text(folder: RunFolder) -> str:
    """Reads the run's ``job.yaml``; returns an empty text if it cannot be read."""
    try:
        return read_file(folder.job).decode("utf-8", "replace") if is_run_file(folder.job) else ""
    except OSError:
        return ""


def job_values(folder: RunFolder) -> Any:
    """Parses the run's ``job.yaml``; returns an empty mapping if it cannot be read."""
    try:
        return parse_document(job_text(folder), file="job.yaml").data or {}
    except UserError:
        return {}


def _formats(values: Any) -> list[str]:
    """Returns the formats that a run of a job can be exported in."""
    task = TASKS.get(str(values.get("task"))) if isinstance(values, dict) else None
    return list(task.exports) if task else []


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json_or_none(read_file(path)) if is_run_file(path) else None
    except OSError:
        return {}
    return found if isinstance(found, dict) else {}
