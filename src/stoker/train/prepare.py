"""Preparation of a job's model, data and task."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stoker.data.build_cache import Report
from stoker.job.load_job import LoadedJob
from stoker.job.task_spec import task_of
from stoker.models.quantise import device_for
from stoker.parallel.float64_mode import arithmetic_of
from stoker.parallel.mesh import Mesh
from stoker.train.prepared import Prepared

if TYPE_CHECKING:
    from stoker.models.objective import Objective


def prepare(
    loaded: LoadedJob,
    base: Path,
    report: Report | None = None,
    *,
    mesh: Mesh | None = None,
    objective: Objective | None = None,
) -> Prepared:
    """Builds the model, data and task of a resolved job.

    Args:
        mesh: the processes of the job's layout; None for a single process.
        objective: replaces the task's objective for a language model.

    Raises:
        UserError: the data does not pass the audit, or the model cannot be loaded or sharded as the job says.
    """
    task = task_of(loaded.job)
    device = device_for(loaded.job, mesh.device if mesh else None)
    with arithmetic_of(device):
        if task.prepare is not None:
            return task.prepare(loaded, device, mesh, base)
        # Imports transformers and peft, which no other task needs; that takes seconds.
        from stoker.train.prepare_language import prepare_language

        return prepare_language(loaded, device, base, report, mesh, objective)
