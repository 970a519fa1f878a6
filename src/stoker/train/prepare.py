"""Preparation of a job's model, data and task."""

from __future__ import annotations

from pathlib import Path

from stoker.checkpoint.object_collectives import by_first
from stoker.data.build_cache import Report
from stoker.errors import UserError
from stoker.hardware.process_device import Device
from stoker.job.conflicts.layout_conflicts import without_loss_scale
from stoker.job.load_job import LoadedJob
from stoker.job.task_spec import task_of
from stoker.models.tuning.quantise import device_for
from stoker.parallel.float64_mode import arithmetic_of
from stoker.parallel.mesh import Mesh
from stoker.runs.run_folder import RunFolder
from stoker.train.prepared import Prepared
from stoker.train.run_schedule import length_of, warmup_problem


def prepare(loaded: LoadedJob, base: Path, report: Report | None = None, *, mesh: Mesh | None = None) -> Prepared:
    """Builds the model, data and task of a resolved job.

    Args:
        mesh: the processes of the job's layout; None for a single process.

    Raises:
        UserError: the data does not pass the audit, the model cannot be loaded or sharded as the job says, or the
            device's precision excludes the layout.
    """
    task = task_of(loaded.job)
    device = device_for(loaded.job, mesh.device if mesh else None)
    _check_fp16(loaded, device)
    with arithmetic_of(device):
        if task.own_model is not None:
            prepared = task.own_model.prepare(loaded, device, mesh, base)
        else:
            # Imports transformers and peft, which no other task needs; that takes seconds.
            from stoker.train.language.prepare_language import prepare_language

            prepared = prepare_language(loaded, device, base, report, mesh)
    try:
        _check_warmup(loaded, prepared, base)
    except UserError:
        prepared.close()
        raise
    return prepared


def _check_warmup(loaded: LoadedJob, prepared: Prepared, base: Path) -> None:
    """Checks that a warm-up in steps ends, now that the data gives the number of steps.

    A log that grows may end it later. A run that has begun goes on, as its warm-up may no longer change.
    """
    job = loaded.job
    if isinstance(job.train.warmup, int) and not task_of(job).grows(job):
        problem = warmup_problem(prepared.job, length_of(prepared.job, prepared.task).steps)
        if problem is not None and not by_first(RunFolder(base / job.output).has_begun):
            raise UserError(loaded.placed(problem))


def _check_fp16(loaded: LoadedJob, device: Device) -> None:
    """Checks that the layout allows a loss scale, if ``precision: auto`` is fp16 on this device."""
    for name, why in without_loss_scale(loaded.job.parallel) if device.precision == "fp16" else ():
        message = f"this device computes in fp16, which scales the loss, and {why}"
        raise UserError(loaded.problem("train.precision", message, f"write another `{name}`, or `precision: fp32`"))
