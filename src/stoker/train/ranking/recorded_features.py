"""Features that a run records as it starts, and by which its rows are parsed from then on."""

from __future__ import annotations

import json
from pathlib import Path

from stoker.checkpoint.dcp_store import Store, place_of
from stoker.checkpoint.memory_restore import steps_in_memory
from stoker.checkpoint.object_collectives import by_first
from stoker.data.ranking.features import Features
from stoker.errors import Problem, UserError
from stoker.files import read_file
from stoker.job.resolved import ResolvedJob
from stoker.runs.run_folder import RunFolder
from stoker.runs.shm_folder import has_folder, shared_folder

FEATURES_FILE = "features.json"  # in the run's folder


def record_of(features: Features) -> str:
    """Returns the text of the file."""
    return json.dumps(features.as_json(), indent=1)


def features_of_run(folder: RunFolder) -> Features:
    """Reads the features that a run parses rows by.

    Raises:
        UserError: the run has no such file, or it has another form.
    """
    path = folder.path / FEATURES_FILE
    try:
        return Features.from_json(json.loads(read_file(path)))
    except OSError as error:
        raise UserError(Problem(f"cannot be read: {error.strerror}", file=str(path))) from error
    except (ValueError, RecursionError) as error:
        raise UserError(Problem("these are not the features of a run", file=str(path))) from error


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
