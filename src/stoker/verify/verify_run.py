"""Trace of a twin's run, step by step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from stoker.checkpoint.gather import gather_whole
from stoker.checkpoint.object_collectives import run_on_all_ranks
from stoker.checkpoint.run_weights import held_gradients, held_weights
from stoker.checkpoint.state import Where
from stoker.data import sequences
from stoker.job.layout import layout_of
from stoker.job.load_job import LoadedJob, load_job
from stoker.models import chunked_head
from stoker.models.families import family_of
from stoker.models.tuning.virtual_tokens import has_prefix
from stoker.parallel.float64_mode import in_float64
from stoker.parallel.mesh import Mesh
from stoker.parallel.shard_spec import NamedShards, local_shard
from stoker.resilience.heartbeat import Heart
from stoker.runs.run_folder import RunFolder
from stoker.runs.step_metrics import StepMetrics
from stoker.train.hooks import Hook
from stoker.train.language.language_task import LanguageTask
from stoker.train.prepare import prepare
from stoker.train.run import train_run
from stoker.train.task import Task
from stoker.verify.difference import Computed, Difference, Key
from stoker.verify.dropout_masks import Draw, Draws, record_dropout_masks
from stoker.verify.replica_check import difference_of_replicas
from stoker.verify.toy_job import EVALUATION_TOKENS

BLOCK = 8  # samples that are looked up together
CHUNK_BYTES = 4 * 520  # of logits that are computed together: of 3 positions, or of 7 and 8 on two tensor processes


@dataclass(frozen=True)
class Trace(Computed):
    """Trace of one run.

    Attributes:
        first: the trained weights before the first step, of one process, where some are random.
        replicas: the largest final difference between processes with the same values.
        drops: whether the model has dropout.
        draws: the dropout masks, by process.
        resumed: place of the state that it resumed from; None if it started fresh.
        batch_norm: whether the model mixes the samples of a pass.
        packed: whether rows are packed and the head is separate; None if the model allows neither.
    """

    first: Mapping[str, Tensor] = field(default_factory=dict)
    replicas: Difference | None = None
    drops: bool = False
    draws: tuple[tuple[Draw, ...], ...] = ()
    resumed: Where | None = None
    batch_norm: bool = False
    packed: bool | None = None


class _Listening(Heart):
    """Heartbeat that passes the run's step to the recorder of dropout masks."""

    def __init__(self, draws: Draws) -> None:
        self._draws = draws
        super().__init__()

    def beat(self, phase: str, step: int = 0) -> None:
        self._draws.step = 0 if phase == "evaluate" else step
        super().beat(phase, step)


def run_and_trace(
    job_file: str,
    device_type: str = "cpu",
    last: int | None = None,
    dropout: bool = False,  # positional, as a pool passes arguments by position
    faulty: bool = False,
) -> Trace | None:
    """Runs a twin's job file under its layout, in this process and its peers; returns the trace on rank 0.

    It resumes where the run's folder has a state.

    Args:
        device_type: ``cpu`` or ``cuda``; a layout of one process takes the best available device.
        last: the last step, if the job sets its length in epochs.
        dropout: whether dropout is active.
        faulty: whether the first two steps are not finite.

    Raises:
        UserError: the layout is impossible.
    """
    path = Path(job_file)
    numbers: dict[Key, float] = {}
    gradients: dict[Key, Tensor] = {}
    with in_float64(), in_small_units(), record_dropout_masks() if dropout else nullcontext(Draws()) as draws:
        loaded = load_job(path)
        mesh = _mesh(loaded, device_type)
        prepared = prepare(loaded, path.parent, mesh=mesh)
        model = prepared.task.model
        shards = prepared.shards
        drops = any(isinstance(m, _DropoutNd) and m.p > 0 for m in model.modules())
        if not dropout:
            _without_dropout(model)
        if isinstance(prepared.task, LanguageTask):
            prepared.task.evaluation_tokens = EVALUATION_TOKENS
        drawn = loaded.job.tune.method != "full" or prepared.new_rows is not None
        first = _whole_weights(model, shards) if mesh is None and drawn else {}

        def on_step(metrics: StepMetrics) -> None:
            numbers.update(_numbers(metrics))
            if metrics.step in (1, last or loaded.job.steps):
                whole = gather_whole(held_gradients(model, shards))
                gradients.update({(metrics.step, name): gradient for name, gradient in whole.items()})

        folder = RunFolder(path.parent / loaded.job.output)
        folder.path.mkdir(exist_ok=True)
        hooks = [Hook(after_step=on_step), *([Hook(after_passes=_not_finite(model, mesh))] if faulty else [])]
        _, loop = train_run(prepared, folder, path.parent, quiet=True, hooks=hooks, heart=_Listening(draws))
        weights = _whole_weights(model, shards)
        replicas = difference_of_replicas(loop.state.now(loop.progress).held)
        made = run_on_all_ranks(lambda: tuple(draws.made))
    if mesh is not None and not mesh.is_first:
        return None
    numbers |= _evaluations(folder)
    return Trace(
        numbers,
        gradients,
        weights,
        first=first,
        replicas=replicas,
        drops=drops,
        draws=tuple(made),
        resumed=loop.resumed_from,
        batch_norm=any(isinstance(module, _BatchNorm) for module in model.modules()),
        packed=_packed(prepared.task) if not has_prefix(model) else None,
    )


@contextmanager
def in_small_units() -> Iterator[None]:
    """Makes a toy run look its samples up in several blocks, and compute the head in several chunks."""
    block, chunk = sequences.BLOCK, chunked_head.CHUNK_BYTES
    sequences.BLOCK, chunked_head.CHUNK_BYTES = BLOCK, CHUNK_BYTES
    try:
        yield
    finally:
        sequences.BLOCK, chunked_head.CHUNK_BYTES = block, chunk


def _numbers(metrics: StepMetrics) -> dict[Key, float]:
    named = {
        "samples": metrics.samples,
        "targets": metrics.trained_tokens,
        "loss": metrics.loss,
        "gradient norm": metrics.grad_norm,
        "learning rate": metrics.lr,
    }
    return {(metrics.step, name): float(value) for name, value in named.items()}


def _evaluations(folder: RunFolder) -> dict[Key, float]:
    found: dict[Key, float] = {}
    for event in folder.read_events():
        if event["event"] == "evaluated":
            found[event["step"], "evaluation loss"] = math.nan if event["loss"] is None else event["loss"]
            if event["accuracy"] is not None:
                found[event["step"], "evaluation accuracy"] = event["accuracy"]
    return found


def _whole_weights(model: nn.Module, shards: NamedShards) -> dict[str, Tensor]:
    whole = gather_whole(held_weights(model, shards))
    return {name.removeprefix("model/"): weight.clone() for name, weight in whole.items()}


def _not_finite(model: nn.Module, mesh: Mesh | None) -> Callable[[int, Tensor], Tensor]:
    """Makes a gradient of the last process infinite in the first step, and the first process' loss NaN in the
    second.
    """
    rank, last = (mesh.rank, mesh.layout.world - 1) if mesh is not None else (0, 0)

    def after_passes(step: int, loss: Tensor) -> Tensor:
        if step == 1 and rank == last:
            gradients = (p.grad for p in model.parameters() if p.grad is not None)
            locally = (local_shard(g) for g in gradients)
            next(g for g in locally if g.numel()).fill_(math.inf)
        return loss * math.nan if step == 2 and rank == 0 else loss

    return after_passes


def _packed(task: Task) -> bool | None:
    language = task.language
    if language is None or family_of(language.model.config) is None:
        return None
    return language.packs and language.head is not None


def _mesh(loaded: LoadedJob, device_type: str) -> Mesh | None:
    layout = layout_of(loaded.job)
    if layout.one_process:
        return None
    device = torch.device("cuda", torch.cuda.current_device()) if device_type == "cuda" else torch.device("cpu")
    return Mesh(layout, device)


def _without_dropout(model: nn.Module) -> None:
    """Disables dropout, as its random numbers depend on how the work is split."""
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
