"""A language model on its device: compiled or not, with its kernels and weights, whole or in parts."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedModel

from stoker.hardware.process_device import Device, is_nvidia
from stoker.job.layout import Layout, layout_of
from stoker.job.resolution.compile_choice import compile_choice, compiles
from stoker.job.resolved import ResolvedJob
from stoker.job.task_spec import NO_CRITIC, task_of
from stoker.models.attention.attention_kernels import choose_kernels, heads_of
from stoker.models.attention.linear_kernels import describe_kernels
from stoker.models.build_model import Built
from stoker.models.critic import attach_critic
from stoker.models.dropout import has_dropout
from stoker.models.families import family_of
from stoker.models.language_model import LanguageModel, OwnCritic, lay_out_for
from stoker.models.meta_model import allocate
from stoker.models.objective import Objective
from stoker.models.router_balance import RouterBalance
from stoker.models.tuning.adapters import unwrap
from stoker.models.weight_source import fill_whole
from stoker.parallel.apply_to_blocks import apply_to_blocks
from stoker.parallel.compile import has_compiler
from stoker.parallel.mesh import Mesh
from stoker.parallel.parallelize import ParallelModel, parallelize


def is_compiled(model: PreTrainedModel, job: ResolvedJob, device: Device) -> bool:
    """Returns whether the model's blocks are compiled."""
    choice = compile_choice(job)
    if choice == "measured" and not has_compiler():
        return False
    return compiles(
        choice,
        layout_of(job),
        model_type=model.config.model_type,
        tuning=job.tune.method,
        precision=device.precision,
        nvidia=is_nvidia(device.torch),
    )


def choose_attention(model: PreTrainedModel, job: ResolvedJob, device: Device, layout: Layout) -> str:
    """Selects the kernels of attention on a GPU; returns their description.

    Newer kernels support no dropout, and are not compared for bitwise reproducible results.
    """
    heads, dtype, length = heads_of(model.config, layout.tensor), device.autocast_dtype, job.train.seq_len
    if heads is None or dtype is None or has_dropout(model) or job.train.deterministic:
        return ""
    return choose_kernels(heads, length - 1, dtype, device.torch)  # a document's last token is only a target


def describe_linear(model: PreTrainedModel, device: Device) -> str:
    """Returns how linear attention is computed; empty for models without, and on a CPU."""
    family, kinds = family_of(model.config), getattr(model.config, "layer_types", None) or ()
    linear = family is not None and "linear_attention" in {*family.by_document}.intersection(kinds)
    return describe_kernels(device.torch) if linear else ""


def place_model(
    built: Built,
    critic: Built | None,
    job: ResolvedJob,
    device: Device,
    mesh: Mesh | None,
    objective: Objective,
    balance: RouterBalance | None,
    *,
    compiled: bool,
) -> tuple[LanguageModel, ParallelModel | None]:
    """Returns the model, with a separate critic if any, in memory: whole, or this process' part of it."""
    if mesh is not None:
        spread_out = parallelize(
            built,
            mesh,
            objective,
            balance=balance,
            compiled=compiled,
            float8=job.train.float8,
            compute=device.autocast_dtype,
            apart=task_of(job).model.critic(job) != NO_CRITIC,
            critic=critic,
        )
        assert spread_out.language is not None
        return spread_out.language, spread_out
    language = _in_one_process(built, job, device, balance, compiled=compiled)
    if critic is not None:
        own = OwnCritic(_in_one_process(critic, job, device, None, compiled=compiled))
        language = replace(language, critic=own)
        attach_critic(built.model, built.weights, critic.model, critic.weights)
    return language, None


def _in_one_process(
    built: Built, job: ResolvedJob, device: Device, balance: RouterBalance | None, *, compiled: bool
) -> LanguageModel:
    """Loads the weights of a model, and applies the job's settings to its blocks."""
    fill_whole(allocate(built.model, device.torch), built.weights)
    inner = unwrap(built.model)
    with device.autocast():
        language = lay_out_for(inner, balance, compiled=compiled)
    layout, family = layout_of(job), family_of(inner.config)
    apply_to_blocks(inner, device.torch, layout, family, compiled=compiled, float8=job.train.float8)
    return language
