"""Passes a job's corners of the batch triangle to the solver."""

from __future__ import annotations

from stoker.job.blocks.parallel_block import ParallelBlock
from stoker.job.layout import Layout, ScheduleName
from stoker.job.resolution.batch_solver import BatchTriangle, solve_batch
from stoker.job.schema import Job
from stoker.job.scratch_sizes import SCRATCH
from stoker.job.task_spec import task_of, unit_size_of

SCRATCH_SEQ_LEN, SEQ_LEN = 512, 1024
# Every key that the triangle depends on.
TRIANGLE = (
    *(f"train.{name}" for name in ("batch", "micro_batch", "accumulation", "seq_len")),
    *(f"parallel.{name}" for name in ("data", "pipeline", "schedule", "devices", "tensor", "context")),
    "task",
)
DEFAULT_SCHEDULE: ScheduleName = "1f1b"


def is_scratch(job: Job) -> bool:
    """Returns whether the model is a catalogue size that is trained from random weights."""
    return job.model is not None and job.model.name in SCRATCH


def seq_len_of(job: Job) -> int:
    """Returns the longest sequence in tokens: as written, else 512 for from-scratch models and 1024 for others."""
    if job.train.seq_len != "auto":
        return job.train.seq_len
    return SCRATCH_SEQ_LEN if is_scratch(job) else SEQ_LEN


def data_parallel_of(job: Job) -> int | None:
    """Returns the data-parallel size, as written or as the devices determine it; None if neither does."""
    parts = job.parallel
    if parts.data == "auto" and parts.devices != "auto":
        return max(1, len(parts.devices) // (parts.tensor * parts.pipeline * parts.context))
    return _number(parts.data)


def pipeline_of(parts: ParallelBlock) -> Layout:
    """Returns the layout's pipeline alone, with the default for a schedule that was not written."""
    schedule = DEFAULT_SCHEDULE if parts.schedule == "auto" else parts.schedule
    return Layout(pipeline=parts.pipeline, schedule=schedule)


def triangle_of(job: Job) -> BatchTriangle:
    """Solves the job's batch triangle. Raises BatchError if its corners contradict each other."""
    train = job.train
    return solve_batch(
        batch=_number(train.batch),
        micro_batch=_number(train.micro_batch),
        accumulation=_number(train.accumulation),
        data_parallel=data_parallel_of(job),
        seq_len=seq_len_of(job) * unit_size_of(job) if task_of(job).text else None,
        default_batch=default_batch(job),
        pipeline=pipeline_of(job.parallel),
        samples=default_batch(job) if task_of(job).rows.prompts else None,  # a policy's are the answers of a round
    )


def default_batch(job: Job) -> int:
    """Returns the default samples per step, used if no corner of the triangle determines them."""
    batch = task_of(job).batch
    return batch(job) if callable(batch) else batch


def _number(corner: int | str) -> int | None:
    return corner if isinstance(corner, int) else None
