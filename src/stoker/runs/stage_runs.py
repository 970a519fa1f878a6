"""``stages.json`` beside the runs of a job's stages: their names and folders, in the job's order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stoker.files import read_file
from stoker.job.stages import StagedJob
from stoker.json_values import json_or_none

RECORD = "stages.json"


def record_of(staged: StagedJob) -> list[dict[str, Any]]:
    """Returns the content of the file."""
    return [
        {
            "name": stage.name,
            "run": stage.output,
            "task": str(stage.document.data.get("task", "")),
            "needs": sorted(set(stage.needs.values())),
        }
        for stage in staged.stages
    ]


def read_record(root: Path) -> list[dict[str, Any]]:
    """Returns the stages below a folder; empty if it belongs to no job with stages. Other content is left out."""
    try:
        values = json_or_none(read_file(root / RECORD))
    except OSError:
        return []
    return [stage for stage in map(_stage, values if isinstance(values, list) else []) if stage is not None]


def _stage(value: Any) -> dict[str, Any] | None:
    """Returns the entry of a stage; None for any other value."""
    if not isinstance(value, dict):
        return None
    stage = {key: value.get(key) for key in ("name", "run", "task", "needs")}
    needs = stage["needs"]
    texts = [stage["name"], stage["run"], stage["task"], *(needs if isinstance(needs, list) else [None])]
    return stage if all(isinstance(text, str) for text in texts) else None
