"""Converts a job to the planner's input, and a layout to a job's block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from stoker.errors import Problem, UserError
from stoker.hardware.machines.cluster import Cluster
from stoker.hardware.processor import has_bf16_matrix_units
from stoker.job.blocks.tune_block import TuneBlock
from stoker.job.keys.tune_keys import ADAPTERS, block_numbers
from stoker.job.layout import Layout, layout_of
from stoker.job.load_job import ISLANDS, LoadedJob, load_job
from stoker.job.paths import absolute
from stoker.job.resolution.compile_choice import compile_choice
from stoker.job.resolved import ResolvedJob
from stoker.job.scratch_sizes import SCRATCH
from stoker.job.task_spec import SHARED_CRITIC, task_of, training_of, unit_size_of
from stoker.job.tokenizer_extension import rows_with_special_tokens
from stoker.node_cache.remote_folder import local_path
from stoker.node_cache.urls import is_url
from stoker.plan.setting import LayoutKind, Setting, TrainingWork
from stoker.plan.shape import Shape
from stoker.plan.shapes.find_shape import shape_of_model
from stoker.plan.shapes.gguf_shape import shape_of_gguf
from stoker.plan.shapes.shape_of_config import shape_of_config
from stoker.plan.software import STOKER, Software
from stoker.plan.trainable_params import PLAIN, Adapters, Encoder
from stoker.runs.find_run import find_run

# Bytes of a parameter's states in float32: AdamW's two moments; the momentum of SGD and of Muon; Adafactor's sums of
# rows and columns.
STATES = {"adamw": 8, "muon": 4, "sgd": 4, "adafactor": 0}
OF_OPTIMIZER: dict[str, tuple[LayoutKind, ...]] = {
    "adafactor": ("tensor", "shard"),
    "muon": ("tensor", "offload", "adapters"),
}
MOMENT_BYTES = {"fp32": 4, "bf16": 2, "8bit": 1 + 4 / 64}  # of a moment's entry; in 8 bits, with the scale of its block


def work_of(loaded: LoadedJob, cluster: Cluster | None = None, *, base: Path | None = None) -> TrainingWork:
    """Returns the work of a resolved job.

    Args:
        cluster: whose devices decide a precision that is `auto`; without one it is bf16.
        base: folder of relative paths of models; by default the current one.

    Raises:
        UserError: at the job's key: the task has no language model, or its shape cannot be found.
    """
    job, base = loaded.job, base or Path.cwd()
    if job.model is None:
        message = f"a job of task {job.task} has no language model to plan for"
        hint = "write the layout into `parallel` yourself"
        if task_of(job).ranks:
            hint = "write `parallel: {data: 2}` yourself: the tower is copied, and rows of tables are spread by id"
        raise UserError(loaded.problem("task", message, hint))
    with loaded.errors_at("model.name"):
        shape = shape_of_name(job.model.name, base, job.model.config)
    rows = rows_with_special_tokens(job.model, shape.vocabulary, base)
    precision = precision_of(job, cluster)
    work = work_of_shape(job, replace(shape, vocabulary=rows), precision=precision)
    stated = loaded.origins[ISLANDS].source != "default"
    work = replace(work, islands=job.parallel.sync.islands if stated else None)
    return replace(work, critic=_critic_work(loaded, base, work))


def _critic_work(loaded: LoadedJob, base: Path, work: TrainingWork) -> TrainingWork | None:
    """Returns the work of a job's critic; None if it is not a separate model."""
    job, task = loaded.job, task_of(loaded.job)
    if not task.model.own_critic(job):
        return None
    named, tune = task.model.critic(job), job.tune
    with loaded.errors_at(f"{task.name}.critic"):
        try:
            run = load_job(find_run(named, base).job).job
        except UserError:
            shape = shape_of_name(named, base)
        else:
            assert run.model is not None
            shape, tune = shape_of_name(run.model.name, base, run.model.config), run.tune
    return critic_work(work, shape, tune)


def critic_work(work: TrainingWork, shape: Shape, tune: TuneBlock) -> TrainingWork:
    """Returns the work of a separate critic model of a policy: the same rows, and one score instead of logits.

    Args:
        shape: of its model, as a language model.
    """
    return replace(
        work,
        shape=with_score_head(shape),
        tuning=tune.method,
        rank=tune.rank,
        adapters=adapters_of(tune, shape.layers),
        quantise="none",
        resident=0,
        reads=0,
        rollouts=None,
        scores=False,
        shared_critic=False,
        critic=None,
    )


def with_score_head(shape: Shape) -> Shape:
    """Returns the shape with a head of one score, without a bias."""
    return replace(shape, scored=True, tied=False, head_bias=False)


def work_of_shape(job: ResolvedJob, shape: Shape, *, precision: str) -> TrainingWork:
    """Returns the work of a resolved job with a model of this shape.

    Raises:
        UserError: the planner has no figures for the precision.
    """
    train, task = job.train, task_of(job)
    if precision == "fp64":
        raise UserError(Problem("the planner has no rates of float64", "plan with train.precision=fp32"))
    return TrainingWork(
        with_score_head(shape) if task.model.head == "score" else shape,
        train.seq_len,
        train.batch,
        precision=precision,
        tuning=job.tune.method,
        rank=job.tune.rank,
        adapters=adapters_of(job.tune, shape.layers),
        quantise=job.model.quantise if job.model is not None else "none",
        rows=unit_size_of(job),
        resident=task.work.resident(job),
        reads=task.work.reads(job),
        rollouts=task.work.rollouts(job),
        scores=training_of(job).objective is not None and task.model.head == "tokens",
        shared_critic=task.model.critic(job) == SHARED_CRITIC,
        sync_every=job.parallel.sync.every,
        refused=refused_by(job),
    )


def refused_by(job: ResolvedJob) -> frozenset[LayoutKind]:
    """Returns what a job's optimizer, adapters and compilation exclude, as `layout_conflicts` judges."""
    train = job.train
    found: set[LayoutKind] = set(OF_OPTIMIZER.get(train.optimizer, ()))
    if train.optimizer_states == "8bit":
        found.add("adapters")
    if job.tune.dora:
        found.add("tensor")
    if train.compile is True:
        found.add("split-backward")
    return frozenset(found)


def adapters_of(tune: TuneBlock, layers: int) -> Adapters:
    """Adapters of a job on a model with this number of blocks, as far as names determine them."""
    if tune.method == "full":
        return PLAIN
    if tune.method in ADAPTERS:
        targets = None if isinstance(tune.targets, str) else tuple(tune.targets)
        blocks = None if tune.layers == "all" else tuple(sorted(block_numbers(tune.layers, layers)))
        return Adapters(targets=targets, blocks=blocks, modules=tuple(tune.modules_to_save))
    width = 0 if tune.width == "auto" else tune.width
    if tune.method == "prefix":
        encoder: Encoder = "projection" if tune.projection else "none"
        return Adapters(tokens=tune.tokens, encoder=encoder, width=width, deep=True)
    if tune.method == "p-tuning" and not tune.deep:
        return Adapters(tokens=tune.tokens, encoder=tune.encoder, width=width)
    return Adapters(tokens=tune.tokens, deep=tune.deep)


def shape_of_name(name: str, base: Path, changes: Mapping[str, Any] | None = None) -> Shape:
    """Returns the shape of a model by its name in a job: a folder or file first, then the catalogue, then the hub.

    Args:
        changes: changed keys of its configuration (`model.config`).

    Raises:
        UserError: the name is unknown, or its configuration cannot be read.
    """
    path = local_path(name) if is_url(name) else absolute(name, base).resolve()
    if path.is_file() and path.suffix == ".gguf":
        return shape_of_gguf(path, changes)
    if (path / "config.json").is_file():
        return shape_of_model(str(path), changes)
    if name in SCRATCH:
        size = SCRATCH[name]
        config = {
            "model_type": "llama",
            "vocab_size": size.vocabulary,
            "hidden_size": size.width,
            "num_hidden_layers": size.layers,
            "num_attention_heads": size.heads,
            "num_key_value_heads": size.kv_heads,
            "intermediate_size": size.mlp_width,
            "tie_word_embeddings": True,
        }
        return shape_of_config(config, name=name)
    return shape_of_model(name, changes)


def precision_of(job: ResolvedJob, cluster: Cluster | None = None) -> str:
    """Precision of the matrix products: the job's, else the fastest of the devices that needs no loss scaling.

    As `stoker.models.tuning.quantise.device_for` decides: bf16, or fp16 where a GPU has no bf16, or fp32 on a processor
    without units for it, or under a quantised base.
    """
    if job.train.float8 != "none":
        return "fp8"
    if job.train.precision != "auto":
        return job.train.precision
    if cluster is None:
        return "bf16"
    if cluster.device.is_cpu:
        quantised = job.model is not None and job.model.quantise != "none"
        return "bf16" if has_bf16_matrix_units() and not quantised else "fp32"
    return "bf16" if "bf16" in cluster.device.peak_tflops else "fp16"


def software_of_job(job: ResolvedJob, shape: Shape) -> Software:
    """Stoker, with the states of the job's optimizer over a model of a shape, and its choice of compiled blocks."""
    states: float = STATES[job.train.optimizer] + 4 * (job.train.average is not None)
    states -= STATES["adamw"] * (1 - MOMENT_BYTES[job.train.optimizer_states] / MOMENT_BYTES["fp32"])
    if job.train.optimizer == "muon":  # AdamW steps the embedding and the head
        states += 4 * (shape.embedding_parameters + shape.head_parameters) / shape.parameters
    outer = 0
    if job.parallel.sync.every > 1:  # the weights of the last synchronisation, and the momentum
        outer = 4 + 4 * (job.parallel.sync.outer == "nesterov")
    muon = job.train.optimizer == "muon"
    return replace(STOKER, states=states, outer=outer, muon=muon, compiles=compile_choice(job))


def setting_of_job(job: ResolvedJob, cluster: Cluster, work: TrainingWork) -> Setting:
    """Returns the layout and the micro-batch that a resolved job states, on a cluster of as many devices."""
    return Setting(work, cluster, layout_of(job), job.train.micro_batch, software=software_of_job(job, work.shape))


def parallel_block(layout: Layout) -> dict[str, Any]:
    """Returns a layout as a job's block `parallel`, without keys that have no effect."""
    block: dict[str, Any] = {"data": layout.data, "shard": layout.shard}
    if layout.shard != "none":
        block["shard_size"] = layout.shard_size
    block["tensor"] = layout.tensor
    if layout.tensor > 1:
        block["sequence"] = layout.sequence
    block["pipeline"] = layout.pipeline
    if layout.pipeline > 1:
        block["schedule"] = layout.schedule
        if layout.stages is not None:
            block["stages"] = list(layout.stages)
    block["context"] = layout.context
    if layout.context > 1:
        block["context_by"] = layout.context_by
    return {**block, "recompute": layout.recompute, "offload": layout.offload}
