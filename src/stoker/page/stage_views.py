"""The stages of a run's job: the needs and the state of each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from stoker.page.run_index import id_of, is_run_file
from stoker.runs.listing import state_of
from stoker.runs.run_folder import RunFolder
from stoker.runs.stage_runs import read_record

WAITING = "waiting"  # the state of a stage that has no run yet


def _record(folder: RunFolder) -> list[dict[str, Any]]:
    """Returns the stages of the job, each with its ``folder``; empty if the run is not a stage."""
    parent = folder.path.parent
    record = [{**stage, "folder": parent / Path(stage["run"]).name} for stage in read_record(parent)]
    return record if any(stage["folder"] == folder.path for stage in record) else []


def parents_of(folder: RunFolder) -> list[str]:
    """Returns the ids of the runs that a stage starts from."""
    record = _record(folder)
    own = next((stage for stage in record if stage["folder"] == folder.path), None)
    return [id_of(stage["folder"]) for stage in record if own and stage["name"] in own["needs"]]


def stages_of(folder: RunFolder, events_of: Callable[[RunFolder], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Returns the stages of a run's job in order, each with the state of its run."""
    return [
        {"name": stage["name"], "task": stage["task"], "needs": stage["needs"], "id": id_of(stage["folder"])}
        | {"status": _state(RunFolder(stage["folder"]), events_of)}
        for stage in _record(folder)
    ]


def _state(run: RunFolder, events_of: Callable[[RunFolder], list[dict[str, Any]]]) -> str:
    return state_of(run, events_of(run)) if is_run_file(run.events) else WAITING
