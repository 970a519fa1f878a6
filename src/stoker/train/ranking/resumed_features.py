"""The features of a run that a job resumes."""

from __future__ import annotations

from pathlib import Path

from stoker.checkpoint.dcp_store import Store, place_of
from stoker.checkpoint.memory_restore import steps_in_memory
from stoker.checkpoint.object_collectives import by_first
from stoker.data.ranking.features import Features
from stoker.data.ranking.recorded_features import FEATURES_FILE, features_of_run
from stoker.job.resolved import ResolvedJob
from stoker.runs.run_folder import RunFolder
from stoker.runs.shm_folder import has_folder, shared_folder


def features_to_resume(job: ResolvedJob, base: Path) -> Features | None:
    """Returns the features of the run that a job resumes; None if it starts from the first step. A collective."""
    folder = RunFolder(base / job.output)
    store = Store(place_of(job.checkpoint.to, folder, base))
    memory = shared_folder(folder.path) if has_folder(folder.path) else None
    if not by_first((folder.path / FEATURES_FILE).is_file):
        return None
    if not steps_in_memory(memory, None) and not by_first(store.steps):
        return None
    return by_first(lambda: features_of_run(folder))
