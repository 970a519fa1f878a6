"""The stages of a run's job: the needs and the state of each."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stoker.files import read_file
from stoker.json_values import json_or_none
from stoker.page.run_data.run_index import id_of, is_run_file
from stoker.runs.listing import state_of
from stoker.runs.run_folder import RunFolder
from stoker.runs.stage_runs import read_record

EventsOf = Callable[[RunFolder], list[dict[str, Any]]]
WAITING = "waiting"  # the state of a stage that has no run yet


def _root_of(run: Path) -> Path | None:
    """Returns the folder of the job that a run is a stage of: its parent, or the one that its lineage names."""
    try:
        lineage = json_or_none(read_file(RunFolder(run).lineage))
    except OSError:
        lineage = None
    named = lineage.get("stages") if isinstance(lineage, dict) else None
    roots = [run.parent, *([Path(os.path.normpath(run / named))] if isinstance(named, str) else [])]
    return next((root for root in roots if any(stage["folder"] == str(run) for stage in read_record(root))), None)


def _record(folder: RunFolder) -> list[dict[str, Any]]:
    """Returns the stages of a run's job; empty if the run is not a stage."""
    root = _root_of(folder.path)
    return read_record(root) if root is not None else []


def job_folder(run: Path) -> Path:
    """Returns the folder of the job that a run is a stage of; the run's own if it is not a stage."""
    return _root_of(run) or run


def run_folders(job: Path) -> list[RunFolder]:
    """Returns the folders of a job's runs: its own, or those of its stages that have one."""
    stages = [RunFolder(Path(stage["folder"])) for stage in read_record(job)]
    return [stage for stage in stages if stage.path.is_dir()] if stages else [RunFolder(job)]


def parents_of(folder: RunFolder) -> list[str]:
    """Returns the ids of the runs that a stage starts from."""
    record = _record(folder)
    own = next((stage for stage in record if stage["folder"] == str(folder.path)), None)
    return [id_of(Path(stage["folder"])) for stage in record if own and stage["name"] in own["needs"]]


def stages_of(folder: RunFolder, events_of: EventsOf) -> list[dict[str, Any]]:
    """Returns the stages of a run's job in order, each with the state of its run."""
    return _views(_record(folder), events_of)


def stages_below(root: Path, events_of: EventsOf) -> list[dict[str, Any]]:
    """Returns the stages of the job whose runs are below ``root``; see `stages_of`. Empty for other folders."""
    return _views(read_record(root), events_of)


def _views(record: list[dict[str, Any]], events_of: EventsOf) -> list[dict[str, Any]]:
    return [
        {"name": stage["name"], "task": stage["task"], "needs": stage["needs"], "id": id_of(Path(stage["folder"]))}
        | {"status": _state(RunFolder(Path(stage["folder"])), events_of)}
        for stage in record
    ]


def _state(run: RunFolder, events_of: EventsOf) -> str:
    return state_of(run, events_of(run)) if is_run_file(run.events) else WAITING
