"""Memory of a stage of a program with fused kernels: model states, activations, logits, buffers.

Sources: Korthikanti et al., 2022, section 4 (activations under tensor and sequence parallelism) and 5 (recomputation);
Dao et al., 2022 (attention that keeps no scores); Narayanan et al., 2021 (micro-batches in flight).
"""

from __future__ import annotations

from planner_runs.program import LateFrees, Program
from stoker.plan.block_dtypes import HALF
from stoker.plan.param_placement import (
    ParamPlacement,
    block_parameters,
    held_parameters,
    packed_parameters,
    trained_parameters,
)
from stoker.plan.setting import PACKED_BYTES, Setting
from stoker.plan.shape import Layer, Shape

BUCKETS = 2 * 25 * 2**20  # bytes of the two buckets that DDP fills and sums
SCORES = 2.5  # numbers of 16 bits for a score: itself, its softmax, a mask of one byte
OPERATORS = 0.35  # of a block's activations: results of every other product, and of attention
WORKSPACES = 2 * 32 * 2**20  # bytes of cuBLAS from Hopper on, for the threads of the forward and backward passes
FULL = 0.7  # of a device's memory: beyond it, what is freed late is waited for


def program_of(setting: Setting) -> Program:
    """The program of a setting of a published run."""
    assert isinstance(setting.software, Program)
    return setting.software


def fused_parts(setting: Setting, stage: int) -> dict[str, float]:
    """Memory by component of programs with fused kernels that keep the sums of gradients from step to step."""
    shape, layout, software, work = setting.shape, setting.layout, program_of(setting), setting.work
    held = held_parameters(setting, stage)

    def share(parameters: ParamPlacement, at: int) -> float:
        return parameters.share(layout.sharers if layout.zero >= at else 1, expert=setting.expert)

    trained = trained_parameters(setting, held)
    weights = share(held, 3) * software.weights
    if work.tuning != "full":
        packed = packed_parameters(setting, stage)
        frozen = HALF if packed else software.frozen
        rest = ParamPlacement(held.dense - packed, held.experts)
        weights = share(ParamPlacement(packed), 3) * PACKED_BYTES.get(work.base, 0.0) + share(rest, 3) * frozen
        weights += share(trained, 3) * 4
    parts: dict[str, float] = {
        "weights": weights,
        "gradients": share(trained, 2) * software.gradients,
        "optimizer": share(trained, 1) * software.states,
    }
    parts["activations"] = stage_activations(setting, stage)
    if stage == setting.last:
        later = software.later_logits * (setting.micro_batches > 1)
        parts["logits"] = setting.predicting * (software.logits + later) * shape.vocabulary / layout.tensor
    parts["buffers"] = _buffers(setting, stage, held.total)
    if "fp8" in setting.cluster.device.peak_tflops:
        parts["buffers"] += WORKSPACES
    if software.late is not None and layout.sequence:
        parts["freed late"] = late_freed(setting, software.late, stage, others=sum(parts.values()))
    return parts


def _buffers(setting: Setting, stage: int, parameters: float) -> float:
    """Bytes beside: gradients that are not summed yet, gathered weights of the largest units under ZeRO-3, DDP's
    buckets."""
    layout, software, shape = setting.layout, program_of(setting), setting.shape
    kinds = setting.blocks[stage]
    block = max(
        (block_parameters(shape, layer, tensor=layout.tensor, expert=setting.expert).total for layer in kinds),
        default=0.0,
    )
    outside = max(shape.embedding_parameters, shape.head_matmul().parameters) / layout.tensor
    ends = stage in (0, setting.last)
    unsummed = software.unsummed * (block + outside * ends) * (setting.work.tuning == "full")
    if layout.data * layout.context == 1:
        return unsummed
    if layout.zero < 3:
        return unsummed if layout.zero else unsummed + min(parameters * 2, BUCKETS)
    # Two gathered blocks, the outermost unit, and the gradients of one block before they are scattered.
    return HALF * (2 * block + outside) + software.gradients * block


def layer_activations(setting: Setting, layer: Layer) -> float:
    """Bytes that one block keeps for the backward pass, for one token of a micro-batch.

    Elements, in 16 bits: the input and the output of each norm and of each addition to the residual; queries, keys,
    values and the result of attention; what goes into and comes out of the MLP's nonlinearity, and its product with
    the gate. What lies between the split matrices is split by tensor parallelism, the rest by sequence parallelism.
    """
    shape, layout, software = setting.shape, setting.layout, program_of(setting)
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
    return (3 if program_of(setting).fused_gate else 4) if shape.gated else 2


def _mlp_width(shape: Shape, layer: Layer) -> float:
    """Width of the MLP that a token goes through, the experts' together."""
    if layer.feed_forward == "dense":
        return shape.mlp_width
    if layer.feed_forward == "experts" and shape.mixture is not None:
        return shape.mixture.per_token * shape.mixture.width + shape.mixture.shared_width
    return 0.0


def stage_activations(setting: Setting, stage: int) -> float:
    """Bytes of all micro-batches in flight on a stage."""
    layout, shape, tokens = setting.layout, setting.shape, setting.tokens
    flying = setting.in_flight(stage)
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
    """Bytes of whole tensors that are freed late: as much as the device has room for.

    Two tensors a block in the forward pass. Where the host gets into the backward pass, four a block, of about twice
    the launches, less the activations that it frees.

    Args:
        others: bytes of everything else on the device.
    """
    layout = setting.layout
    whole = HALF * setting.tokens * setting.shape.width
    flying = sum(setting.blocks[stage].values()) * setting.in_flight(stage)
    forward = late.blocks(setting, flying, whole / layout.tensor)
    freed = forward * 2 * whole
    if layout.pipeline == 1:
        kept = setting.tokens * max(layer_activations(setting, layer) for layer in setting.blocks[stage])
        freed += (late.ahead - forward) / 2 * max(0.0, 4 * whole - kept)
    room = FULL * setting.cluster.device.memory_gib * 2**30 - others
    return max(0.0, min(freed, room))
