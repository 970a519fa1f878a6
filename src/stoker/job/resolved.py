"""The job that is run: every ``auto`` that depends on neither the machine, the model nor the data has a value.

Only types are narrowed here: names, meanings, bounds and order of the keys are those of `stoker.job.schema`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import create_model

from stoker.job.block import Auto
from stoker.job.blocks.evaluate_block import EvaluateBlock
from stoker.job.blocks.parallel_block import ParallelBlock, SyncBlock
from stoker.job.blocks.source_block import SourceBlock
from stoker.job.blocks.train_block import TrainBlock
from stoker.job.blocks.tune_block import TuneBlock
from stoker.job.layout import ContextBy, ScheduleName
from stoker.job.schema import Job
from stoker.job.task_spec import TASKS


class ResolvedSource(SourceBlock):
    too_long: Literal["cut", "drop", "split"]


class ResolvedTune(TuneBlock):
    alpha: float


class ResolvedTrain(TrainBlock):
    lr: float
    batch: int
    micro_batch: int
    accumulation: int
    seq_len: int
    pack: bool
    beta2: float
    eps: float
    warmup: int | float
    weight_decay: float
    compile: bool | Auto


class ResolvedEvaluate(EvaluateBlock):
    data: list[ResolvedSource]  # type: ignore[assignment]  # no list is ever appended to
    fraction: float
    rows: int | Literal["all"]


class ResolvedSync(SyncBlock):
    islands: int


class ResolvedParallel(ParallelBlock):
    data: int
    shard_size: int
    sequence: bool
    schedule: ScheduleName
    context_by: ContextBy
    expert: int
    sync: ResolvedSync


class ResolvedJob(Job):
    data: list[ResolvedSource]  # type: ignore[assignment]
    tune: ResolvedTune
    output: str
    train: ResolvedTrain
    evaluate: ResolvedEvaluate
    parallel: ResolvedParallel


if not TYPE_CHECKING:  # the tasks' blocks
    ResolvedJob = create_model(
        "ResolvedJob",
        __base__=ResolvedJob,
        __module__=__name__,
        **{
            name: (task.block.resolved | None, Job.model_fields[name])
            for name, task in TASKS.items()
            if task.block and task.block.resolved
        },
    )
