"""The job file's schema: its blocks (`stoker.job.blocks`) and the keys beside them, each with its type, default and a
one-sentence description.

The models hold the values that the user may write. ``auto`` is a value: it is resolved, with a stated reason, in
`stoker.job.resolution.resolve`. The one-sentence ``description`` of a field is shown by ``stoker new`` as its comment
and published in the JSON schema.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, create_model

from stoker.job.block import Block, PositiveInt, Text
from stoker.job.blocks.checkpoint_block import CheckpointBlock
from stoker.job.blocks.evaluate_block import EvaluateBlock
from stoker.job.blocks.export_block import ExportBlock
from stoker.job.blocks.faults_block import FaultsBlock
from stoker.job.blocks.mix_block import MixBlock
from stoker.job.blocks.model_block import ModelBlock
from stoker.job.blocks.parallel_block import ParallelBlock
from stoker.job.blocks.source_block import SourceBlock
from stoker.job.blocks.train_block import TrainBlock
from stoker.job.blocks.tune_block import TuneBlock
from stoker.job.targets import TargetBlock
from stoker.job.task_spec import TASKS

SCHEMA_VERSION = 1


class Job(Block):
    """A training job: parameters of Stoker's fixed code, and the dataset they are applied to."""

    version: Literal[1] = Field(default=1, description="schema version of this file")
    task: str = Field(description="training task")
    model: ModelBlock | None = Field(default=None, description="the model")
    data: list[SourceBlock] = Field(default_factory=list, description="the training data, one or several sources")
    mix: MixBlock = Field(default_factory=MixBlock, description="mixing of several sources")
    tune: TuneBlock = Field(default_factory=TuneBlock, description="tuning method: the parameters that are trained")
    steps: PositiveInt | None = Field(default=None, description="number of optimizer steps; alternatively, give epochs")
    epochs: Annotated[float, Field(gt=0, le=1e6)] | None = Field(
        default=None, description="number of passes over the data; alternatively, give steps"
    )
    seed: Annotated[int, Field(ge=0, lt=2**31)] = Field(
        default=0, description="random seed for the data order, the initial weights and dropout"
    )
    output: str | None = Field(default=None, description="folder of the run; by default runs/<name of the job file>")
    train: TrainBlock = Field(
        default_factory=TrainBlock, description="training settings: batch, optimizer, schedule, precision"
    )
    evaluate: EvaluateBlock = Field(default_factory=EvaluateBlock, description="held-out evaluation")
    checkpoint: CheckpointBlock = Field(default_factory=CheckpointBlock, description="checkpoints")
    faults: FaultsBlock = Field(
        default_factory=FaultsBlock, description="fault handling: restarts, lost devices, hangs, invalid numbers"
    )
    parallel: ParallelBlock = Field(
        default_factory=ParallelBlock, description="parallel layout; or auto: chosen by the planner"
    )
    export: ExportBlock = Field(default_factory=ExportBlock, description="exports during training")
    target: Text | TargetBlock = Field(
        default="local",
        description="where `stoker submit` starts the job: a block ssh, slurm, ray or kubernetes, a file with one, "
        "or a name in targets.yaml",
    )


if not TYPE_CHECKING:  # depends on the tasks' names, and on the blocks that tasks add
    Job = create_model(
        "Job",
        __base__=Job,
        __module__=__name__,
        __doc__=Job.__doc__,
        task=(Literal[tuple(TASKS)], Job.model_fields["task"]),
        **{
            name: (task.block.written | None, Field(default=None, description=f"the block of task: {name}"))
            for name, task in TASKS.items()
            if task.block
        },
    )
