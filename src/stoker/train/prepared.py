"""A prepared job: its model, data, task and engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import nn

from stoker.checkpoint.run_weights import trainable
from stoker.errors import Problem
from stoker.hardware.process_device import Device
from stoker.job.resolved import ResolvedJob
from stoker.models.tuning.quantise import unpacked_numel
from stoker.parallel.mesh import Mesh
from stoker.parallel.parallel_model import ParallelModel
from stoker.parallel.shard_spec import WHOLE, NamedShards
from stoker.train.distributed import Distributed
from stoker.train.engine import Engine
from stoker.train.hooks import Hook
from stoker.train.single_process import SingleProcess
from stoker.train.task import Task
from stoker.train.training_state import FurtherState

if TYPE_CHECKING:
    from stoker.data.audit import Audit
    from stoker.data.corpus import Corpus
    from stoker.models.resize_embeddings import NewRows
    from stoker.models.text import TextSide


@dataclass(frozen=True)
class Prepared:
    """A job with its model, data and task: everything but the loop.

    Attributes:
        job: the job resolved for this machine, with precision and sequence length.
        facts: lines that are printed and recorded before training starts.
        fingerprints: fingerprint of each data source, by name, and of the tokenizer.
        engine: runs forward and backward passes, alone or with other processes.
        parallel: this process' part of the model; None for a single process.
        audit: the audit of a language task's data.
        new_rows: embedding rows of tokens that the model did not have.
        further: state that checkpoints hold beside weights and moments.
        hooks: the task's hooks into the training step.
        mesh: the processes of the layout; None for a single process.
        records: further files of the run's folder, by name, which are written once its state is restored.
        data_problem: see `stoker.train.records.resume_check.check_same_job`.
    """

    job: ResolvedJob
    task: Task
    device: Device
    facts: dict[str, str]
    fingerprints: dict[str, str]
    engine: Engine
    parallel: ParallelModel | None = None
    audit: Audit | None = None
    corpus: Corpus | None = None
    text: TextSide | None = None
    new_rows: NewRows | None = None
    further: FurtherState | None = None
    hooks: tuple[Hook, ...] = ()
    mesh: Mesh | None = None
    records: Mapping[str, str] = field(default_factory=dict)
    data_problem: Callable[[Mapping[str, str]], Problem | None] | None = None

    @property
    def shards(self) -> NamedShards:
        """Names and pieces of this process' parameters."""
        return self.parallel.shards if self.parallel is not None else WHOLE

    def close(self) -> None:
        """Ends the builds of the data that still run in the background."""
        if self.corpus is not None:
            self.corpus.close()


def engine_of(task: Task, device: Device, mesh: Mesh | None, parts: ParallelModel | None) -> Engine:
    """Returns the engine of a task: of a single process, or of the processes of a mesh."""
    if mesh is None or parts is None:
        return SingleProcess(task, device, list(trainable(task.model).values()))
    return Distributed(task, device, mesh, root=parts.root, pipeline=parts.pipeline, gradients=parts.gradients)


def describe_parameters(model: nn.Module) -> str:
    """Formats parameter counts: ``134.5 M parameters, 4.9 M trained (3.6 %)``; below a million with all digits."""
    trained = sum(p.numel() for p in trainable(model).values())
    total = max(1, sum(map(unpacked_numel, model.parameters())))
    return f"{count_of(total)} parameters, {count_of(trained)} trained ({trained / total:.1%})"


def count_of(parameters: int) -> str:
    """Formats a number of parameters."""
    return f"{parameters / 1e6:,.1f} M" if parameters >= 1e6 else f"{parameters:,}"
