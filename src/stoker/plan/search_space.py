"""The settings that a search covers: those that Stoker can train with, restricted to the requested values."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from stoker.job.layout import SPLIT_BACKWARD, Layout, Offload, Recompute, ScheduleName, Shard
from stoker.plan.setting import LayoutKind, Setting

# The families that Stoker can split, and the axes that it cannot split them over: as in `stoker.models.families` (a
# test compares the two; planning must not wait for PyTorch).
SPLIT = (
    "bloom", "cohere", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "gpt2", "gpt_neo", "gpt_neox", "gptj",
    "granite", "llama", "mistral", "mixtral", "opt", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
)  # fmt: skip
WHOLE = {"phi3": ("tensor",), "granite": ("pipeline",)}


def supports_axis(family: str, axis: str) -> bool:
    """Returns whether a family splits over ``tensor``, ``pipeline`` or ``context``; true for an unnamed one."""
    return not family or (family in SPLIT and axis not in WHOLE.get(family, ()))


def trainable(setting: Setting) -> bool:
    """Returns whether Stoker can train with the setting, as `stoker.job.layout_conflicts` judges a job that states it.

    Schedules with split backward passes do not recompute; fp16 scales the loss, which neither stages nor gradients on
    the host allow; activations of pipelines are not offloaded; virtual tokens are made for whole rows and models; a
    quantised base is stored in blocks that cannot be split; islands are replicas; a policy samples with a cache of keys
    and values that is not split over stages or context. `TrainingWork.refused` names what other keys exclude.
    """
    layout, work = setting.layout, setting.work
    axes = (("tensor", layout.tensor), ("pipeline", layout.pipeline), ("context", layout.context))
    alone = work.sync_every > 1 and layout.islands == 1
    if (
        alone
        or work.refused & _kinds(layout)
        or not all(size == 1 or supports_axis(work.shape.family, axis) for axis, size in axes)
    ):
        return False
    split_backward = layout.schedule in SPLIT_BACKWARD and layout.recompute != "none"
    scaled = work.precision == "fp16"
    in_flight = split_backward or scaled or layout.offload == "activations"
    if (layout.pipeline > 1 and in_flight) or (layout.offload == "params" and scaled):
        return False
    tokens = work.adapters.tokens > 0
    if (tokens or work.rollouts is not None) and layout.pipeline * layout.context > 1:
        return False
    if tokens and layout.tensor > 1:
        return False
    if work.adapters.prefix and layout.recompute != "none":
        return False
    return work.base == "none" or (layout.tensor == layout.pipeline == 1 and layout.offload != "params")


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
