"""The stages of a run's job: the needs and the state of each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from stoker.page.run_data.run_index import id_of, is_run_file
from stoker.runs.listing import state_of
from stoker.runs.run_folder import RunFolder
from stoker.runs.stage_runs import read_record

EventsOf = Callable[[RunFolder], list[dict[str, Any]]]
WAITING = "waiting"  # the state of a stage that has no run yet


def _record_of(root: Path) -> list[dict[str, Any]]:
    """Returns the stages of a job whose runs are below a folder, each with its ``folder``."""
    return [{**stage, "folder": root / Path(stage["run"]).name} for stage in read_record(root)]


def _record(folder: RunFolder) -> list[dict[str, Any]]:
    """Returns the stages of a run's job; empty if the run is not a stage."""
    record = _record_of(folder.path.parent)
    return record if any(stage["folder"] == folder.path for stage in record) else []


def job_folder(run: Path) -> Path:
    """Returns the folder of the job that a run is a stage of; the run's own if it is not a stage."""
    return run.parent if _record(RunFolder(run)) else run


def run_folders(job: Path) -> list[RunFolder]:
    """Returns the folders of a job's runs: its own, or those of its stages that have one."""
    stages = [RunFolder(stage["folder"]) for stage in _record_of(job)]
    return [stage for stage in stages if stage.path.is_dir()] if stages else [RunFolder(job)]


def parents_of(folder: RunFolder) -> list[str]:
    """Returns the ids of the runs that a stage starts from."""
    record = _record(folder)
    own = next((stage for stage in record if stage["folder"] == folder.path), None)
    return [id_of(stage["folder"]) for stage in record if own and stage["name"] in own["needs"]]


def stages_of(folder: RunFolder, events_of: EventsOf) -> list[dict[str, Any]]:
    """Returns the stages of a run's job in order, each with the state of its run."""
    return _views(_record(folder), events_of)


def stages_below(root: Path, events_of: EventsOf) -> list[dict[str, Any]]:
    """Returns the stages of the job whose runs are below ``root``; see `stages_of`. Empty for other folders."""
    return _views(_record_of(root), events_of)


def _views(record: list[dict[str, Any]], events_of: EventsOf) -> list[dict[str, Any]]:
    return [
        {"name": stage["name"], "task": stage["task"], "needs": stage["needs"], "id": id_of(stage["folder"])}
        | {"status": _state(RunFolder(stage["folder"]), events_of)}
        for stage in record
    ]


def _state(run: RunFolder, events_of: EventsOf) -> str:
    return state_of(run, events_of(run)) if is_run_file(run.events) else WAITING
