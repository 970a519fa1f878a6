"""Files of a run's folder; a ``job.yaml`` beside one of them was written by Stoker, not by a user."""

from __future__ import annotations

import os
from pathlib import Path

LOCK = ".lock"
# The files of a run. Other programs do not write records.
RECORDS = (LOCK, "environment.json", "plan.json", "metrics.jsonl", "repeated.jsonl", "events.jsonl", "lineage.json")


def is_of_run(job: Path) -> bool:
    """Returns whether a job file, or its link target, is in a run's folder."""
    folders = {job.parent, job.resolve().parent}
    return any(os.path.lexists(folder / name) for folder in folders for name in RECORDS) or any(
        any(folder.glob(pattern)) for folder in folders for pattern in ("checkpoints/*step-*", "logs/rank-*")
    )
