"""``stages.json`` in the folder of a job with stages: their names and the folders of their runs, in the job's order."""

from __future__ import annotations

import os
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
            "folder": os.path.relpath(stage.output, staged.root),
            "task": str(stage.document.data.get("task", "")),
            "needs": sorted(set(stage.needs.values())),
        }
        for stage in staged.stages
    ]


def read_record(root: Path) -> list[dict[str, Any]]:
    """Returns the stages of the job in a folder; empty if it has none. Other content is left out.

    The ``folder`` of each is the path of its run.
    """
    try:
        values = json_or_none(read_file(root / RECORD))
    except OSError:
        return []
    stages = [stage for stage in map(_stage, values if isinstance(values, list) else []) if stage is not None]
    return [{**stage, "folder": os.path.normpath(root / stage["folder"])} for stage in stages]


def _stage(value: Any) -> dict[str, Any] | None:
    """Returns the entry of a stage; None for any other value."""
    if not isinstance(value, dict):
        return None
    stage = {key: value.get(key) for key in ("name", "run", "task", "needs")}
    needs = stage["needs"]
    texts = [stage["name"], stage["run"], stage["task"], *(needs if isinstance(needs, list) else [None])]
    if not all(isinstance(text, str) for text in texts):
        return None
    folder = value.get("folder")  # records of earlier versions lack it
    return {**stage, "folder": folder if isinstance(folder, str) else Path(str(stage["run"])).name}
