"""What a pipeline stage keeps of the micro-batches that have been forward and not yet backward.

Sources: Korthikanti et al., 2022, section 4 (activations under tensor and sequence parallelism) and 5 (recomputation);
Dao et al., 2022 (attention that keeps no scores); Narayanan et al., 2021 (micro-batches in flight).
"""

from __future__ import annotations

from functools import lru_cache

from stoker.job.layout import ScheduleName
from stoker.plan.pipeline import schedule
from stoker.plan.setting import Setting
from stoker.plan.shape import Layer, Shape
from stoker.plan.software import LateFrees

HALF = 2  # bytes of a 16-bit number
SCORES = 2.5  # numbers of 16 bits for a score: itself, its softmax, a mask of one byte
OPERATORS = 0.35  # of a block's activations: results of every other product, and of attention
FULL = 0.7  # of a device's memory: beyond it, what is freed late is waited for


def layer_activations(setting: Setting, layer: Layer) -> float:
    """Bytes that one block keeps for the backward pass, for one token of a micro-batch.

    Elements, in 16 bits: the input and the output of each norm and of each addition to the residual; queries, keys,
    values and the result of attention; what goes into and comes out of the MLP's nonlinearity, and its product with
    the gate. What stands inside the split matrices is split by tensor parallelism, the rest by sequence parallelism.
    """
    shape, layout, software = setting.shape, setting.layout, setting.software
    outside, inside = 0.0, 0.0
    selective = layout.recompute == "selective"
    if layer.attentions or layer.state_space:
        outside += 3 * shape.width
        inside += 2 * shape.query_width + 2 * shape.key_value_width + 2 * shape.heads
        if not software.flash and not selective:
            inside += SCORES * shape.heads * setting.work.attended
    inside += _nonlinear(setting, shape) * _mlp_width(shape, layer)
    if layer.feed_forward != "none":
        outside += 3 * shape.width
    if layer.feed_forward == "experts" and shape.mixture is not None:
        inside += 2 * shape.mixture.per_token * shape.width  # on their way to the experts and back
    if software.dropout:
        outside += shape.width  # two masks of a byte
    kept = HALF * (outside / (layout.tensor if layout.sequence else 1) + inside / layout.tensor)
    return kept * OPERATORS if selective and software.flash else kept


def _nonlinear(setting: Setting, shape: Shape) -> float:
    """Elements kept for each of the MLP's width."""
    return (3 if setting.software.fused_gate else 4) if shape.gated else 2


def _mlp_width(shape: Shape, layer: Layer) -> float:
    """Of the MLP that a token goes through, the experts' together."""
    if layer.feed_forward == "dense":
        return shape.mlp_width
    if layer.feed_forward == "experts" and shape.mixture is not None:
        return shape.mixture.per_token * shape.mixture.width + shape.mixture.shared_width
    return 0.0


def stage_activations(setting: Setting, stage: int) -> float:
    """Bytes of all micro-batches in flight on a stage."""
    layout, shape, tokens = setting.layout, setting.shape, setting.tokens
    flying = in_flight(setting, stage)
    kept = {layer: layer_activations(setting, layer) for layer in setting.blocks[stage]}
    boundary = HALF * shape.width / (layout.tensor if layout.sequence else 1)
    if layout.recompute == "full":
        total = flying * boundary * sum(setting.blocks[stage].values()) + max(kept.values(), default=0.0)
    else:
        total = flying * sum(kept[layer] * count for layer, count in setting.blocks[stage].items())
    if stage == 0:  # the embedding's result, the same gathered or dropped out, and the first block's input
        total += 3 * flying * boundary
    if layout.sequence:  # of the matrices at work: a gathered input, a result not yet scattered, their gradients
        total += 4 * HALF * shape.width
    return tokens * total


def late_freed(setting: Setting, late: LateFrees, stage: int, *, others: float) -> float:
    """Bytes of inputs gathered for split matrices that are freed late: as much as the device has room for.

    Args:
        others: bytes of everything else on the device.
    """
    layout = setting.layout
    split = HALF * setting.tokens * setting.shape.width / layout.tensor
    share = late.share(layout.pipeline, layout.tensor, split, per_node=setting.cluster.per_node)
    blocks = sum(setting.blocks[stage].values()) * in_flight(setting, stage)
    gathered = 2 * HALF * setting.shape.width * setting.tokens * blocks
    room = FULL * setting.cluster.device.memory_gib * 2**30 - others
    return max(0.0, min(share * gathered, room))


def in_flight(setting: Setting, stage: int) -> float:
    """Micro-batches whose activations the stage holds at most, counted as passes through all of its blocks."""
    layout = setting.layout
    if layout.pipeline == 1:
        return 1.0
    return _in_flight(layout.schedule, layout.pipeline, setting.micro_batches, setting.chunks)[stage]


@lru_cache(maxsize=65536)
def _in_flight(name: ScheduleName, processes: int, micro_batches: int, chunks: int) -> tuple[float, ...]:
    kept = schedule.in_flight(name, processes=processes, micro_batches=micro_batches, chunks=chunks)
    return tuple(sum(counts) / len(counts) for counts in kept)
