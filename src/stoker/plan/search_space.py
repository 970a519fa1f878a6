"""The settings that a search covers: those that Stoker can train with, restricted to the requested values."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from stoker.job.layout import SPLIT_BACKWARD, Layout, Offload, Recompute, ScheduleName, Shard
from stoker.plan.setting import LayoutKind, Setting

# The families that Stoker can split, and the axes that it cannot split them over: as in `stoker.models.families` (a
# test compares the two; planning must not wait for PyTorch).
SPLIT = (
    "afmoe", "apertus", "arcee", "bloom", "cohere", "cohere2", "cwm", "deepseek_v2", "deepseek_v3", "deepseek_v32",
    "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "gemma", "gemma2", "gemma3_text", "gemma4_text",
    "glm", "glm4", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt2", "gpt_neo", "gpt_neox", "gpt_oss", "gptj",
    "granite", "granitemoe", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "jais2", "llama", "llama4_text",
    "mimo_v2_flash", "minimax_m2", "ministral", "ministral3", "mistral", "mixtral", "nanochat", "nemotron", "olmo",
    "olmo2", "olmo3", "olmoe", "opt", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_5_moe_text",
    "qwen3_5_text", "qwen3_moe", "qwen3_next", "seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2",
    "vaultgemma",
)  # fmt: skip
WHOLE = {
    "nanochat": ("pipeline",),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "deepseek_v32", "glm_moe_dsa"), ("context",)),
}


def supports_axis(family: str, axis: str) -> bool:
    """Returns whether a family splits over ``tensor``, ``pipeline`` or ``context``; true for an unnamed one."""
    return not family or (family in SPLIT and axis not in WHOLE.get(family, ()))


def trainable(setting: Setting) -> bool:
    """Returns whether Stoker can train with the setting, as `layout_conflicts` judges a job that states it.

    `TrainingWork.refused` names what keys outside of `parallel` exclude.
    """
    layout, work = setting.layout, setting.work
    axes = (("tensor", layout.tensor), ("pipeline", layout.pipeline), ("context", layout.context))
    pipelined, scaled, tokens = layout.pipeline > 1, work.precision == "fp16", work.adapters.tokens > 0
    return not (
        (work.sync_every > 1 and layout.islands == 1)  # islands are replicas
        or work.refused & _kinds(layout)
        or any(size > 1 and not supports_axis(work.shape.family, axis) for axis, size in axes)
        or (pipelined and work.shape.one_stage)
        # Schedules with split backward passes do not recompute.
        or (pipelined and layout.schedule in SPLIT_BACKWARD and layout.recompute != "none")
        # fp16 scales the loss, which neither stages nor gradients on the host allow.
        or (scaled and (pipelined or layout.offload == "params"))
        or (pipelined and layout.offload == "activations")
        # Virtual tokens are made for whole rows and models. A policy samples with a cache of keys and values that is
        # not split over stages or context.
        or ((tokens or work.rollouts is not None) and layout.pipeline * layout.context > 1)
        or (work.rollouts is not None and work.rollouts.prompts % layout.data)  # each process asks equally many
        or (tokens and layout.tensor > 1)
        or (work.adapters.prefix and layout.recompute != "none")
        # A quantised base is stored in blocks that cannot be split.
        or (work.base != "none" and (layout.tensor > 1 or pipelined or layout.offload == "params"))
    )


def _kinds(layout: Layout) -> set[LayoutKind]:
    """Returns the kinds of parallelism and offload in a layout that keys outside of `parallel` may exclude."""
    kinds: dict[LayoutKind, bool] = {
        "tensor": layout.tensor > 1,
        "shard": layout.shard != "none",
        "offload": layout.steps_on_host,
        "split-backward": layout.pipeline > 1 and layout.schedule in SPLIT_BACKWARD,
    }
    return {kind for kind, there in kinds.items() if there}


@dataclass(frozen=True)
class Space:
    """A part of all settings; None is any value.

    Attributes:
        tensor, pipeline, context, micro_batch, recompute: as `Layout` and `Setting` name them.
        shard, shard_size, schedule, offload: the same, of what does not change the passes.
    """

    tensor: Collection[int] | None = None
    pipeline: Collection[int] | None = None
    context: Collection[int] | None = None
    micro_batch: Collection[int] | None = None
    recompute: Collection[Recompute] | None = None
    shard: Collection[Shard] | None = None
    shard_size: Collection[int] | None = None
    schedule: Collection[ScheduleName] | None = None
    offload: Collection[Offload] | None = None

    def reaches(self, setting: Setting) -> bool:
        """Returns whether the space includes its axes, micro-batch and recomputation."""
        layout = setting.layout
        return (
            _in(layout.tensor, self.tensor)
            and _in(layout.pipeline, self.pipeline)
            and _in(layout.context, self.context)
            and _in(setting.micro_batch, self.micro_batch)
            and _in(layout.recompute, self.recompute)
        )

    def has(self, setting: Setting) -> bool:
        """Returns whether the space includes all of it, and Stoker can train with it."""
        layout = setting.layout
        return (
            self.reaches(setting)
            and _in(layout.shard, self.shard)
            and _in(layout.shard_size, self.shard_size)
            and (layout.pipeline == 1 or _in(layout.schedule, self.schedule))
            and _in(layout.offload, self.offload)
            and trainable(setting)
        )


EVERYTHING = Space()


def _in(value: object, values: Collection[object] | None) -> bool:
    return values is None or value in values
