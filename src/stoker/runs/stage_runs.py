"""``stages.json`` beside the runs of a job's stages: their names and folders, in the job's order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stoker.files import read_file
from stoker.job.stages import StagedJob

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
    """Returns the stages below a folder; empty if it belongs to no job with stages."""
    try:
        values = json.loads(read_file(root / RECORD))
        return [{key: stage[key] for key in ("name", "run", "task", "needs")} for stage in values]
    except (OSError, ValueError, KeyError, TypeError):
        return []
