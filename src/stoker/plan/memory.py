"""What a device must hold, by component: the formulas of `docs/planner.md`.

Sources: Rajbhandari et al., 2020 (model states under ZeRO, section 3.1 and 5); Korthikanti et al., 2022 (activations
under tensor and sequence parallelism, section 4; recomputation, section 5); Dao et al., 2022 (attention that keeps no
scores); Narayanan et al., 2021 (micro-batches in flight).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from stoker.job.layout import SHARDS, Shard
from stoker.plan.setting import Setting
from stoker.plan.shape import Layer, Shape

HALF = 2  # bytes of a 16-bit number
QUANTISED = 0.55  # bytes of a 4-bit number with its share of the scales
CONTEXT = 1.5 * 2**30  # bytes that a GPU's context and the communication library's buffers take from every process
UNMERGED = 0.04  # of what is allocated beside the model states: blocks that the allocator cannot join
BOUND = 0.10  # of the estimate, that the upper bound adds to it


@dataclass(frozen=True)
class Memory:
    """Bytes on the devices of one stage of the pipeline.

    Attributes:
        parts: by component: weights, gradients, optimizer, activations, logits, buffers, fragmentation.
        host: bytes in the host's memory, per device.
        outside: bytes that the device's context takes beside what the program allocates.
    """

    parts: Mapping[str, float]
    host: float = 0.0
    outside: float = 0.0

    @property
    def peak(self) -> float:
        """The point estimate."""
        return sum(self.parts.values())

    @property
    def upper(self) -> float:
        """What should not be exceeded."""
        return self.peak * (1 + BOUND)


def model_states(parameters: float, *, shard: Shard, over: int, weights: int, gradients: int, states: int) -> float:
    """Bytes of weights, gradients and optimizer states of a device.

    ZeRO's figures: 7.5e9 parameters with 2 + 2 + 12 bytes over 64 devices are 120, 31.4, 16.6 and 1.9 GB.

    Args:
        over: devices that a copy is sharded over.
    """
    zero = SHARDS.index(shard)
    parts = (weights, zero >= 3), (gradients, zero >= 2), (states, zero >= 1)
    return sum(parameters * size / (over if sharded else 1) for size, sharded in parts)


@dataclass(frozen=True)
class Held:
    """Parameters of one stage on one process, before data-parallel sharding.

    Attributes:
        experts: those of routed experts: only processes that hold the same ones can shard them.
    """

    dense: float
    experts: float = 0.0

    @property
    def total(self) -> float:
        return self.dense + self.experts

    def share(self, over: int, *, expert: int) -> float:
        """What a process has of them when they are sharded over so many that see different tokens."""
        return self.dense / over + self.experts / max(1, over // expert)


def held_parameters(setting: Setting, stage: int) -> Held:
    """Parameters of a stage."""
    return _held(setting.shape, setting.stages, setting.layout.tensor, setting.expert)[stage]


def trained_parameters(setting: Setting, held: Held) -> Held:
    """Of those that a process holds; under adapters, its part of theirs."""
    if setting.work.tuning == "full":
        return held
    adapters = setting.shape.lora_parameters(setting.work.rank)
    return Held(adapters / setting.layout.tensor / setting.layout.pipeline)


def most_held(setting: Setting) -> Held:
    """Of the stage with most parameters."""
    stages = _held(setting.shape, setting.stages, setting.layout.tensor, setting.expert)
    return max(stages, key=lambda held: held.total)


@lru_cache(maxsize=4096)
def _held(shape: Shape, stages: tuple[range, ...], tensor: int, expert: int) -> tuple[Held, ...]:
    kinds = {shape.layer(i) for i in range(shape.layers)}
    sizes = {layer: block_parameters(shape, layer, tensor=tensor, expert=expert) for layer in kinds}
    dense = [sum(sizes[shape.layer(i)].dense for i in stage) for stage in stages]
    experts = [sum(sizes[shape.layer(i)].experts for i in stage) for stage in stages]
    dense[0] += shape.embedding_parameters / tensor
    dense[-1] += shape.final_norm_parameters + shape.head_parameters / tensor
    if shape.tied and len(stages) > 1:  # a copy of the embedding
        dense[-1] += shape.head_matmul().parameters / tensor
    return tuple(Held(*sizes) for sizes in zip(dense, experts, strict=True))


@lru_cache(maxsize=4096)
def block_parameters(shape: Shape, layer: Layer, *, tensor: int, expert: int) -> Held:
    """Parameters of one block on one process: matrices are split, experts are spread, vectors are whole."""
    dense, experts = float(shape.vectors(layer)), 0.0
    for matmul in shape.matmuls(layer):
        held = matmul.parameters / (1 if matmul.split == "replicated" else tensor)
        if matmul.copies > 1:
            experts += held / expert
        else:
            dense += held
    return Held(dense, experts)


def layer_activations(setting: Setting, layer: Layer) -> float:
    """Bytes that one block keeps for the backward pass, for one token of a micro-batch.

    Elements, in 16 bits: the input and the output of each norm and of each addition to the residual; queries, keys,
    values and the result of attention; what goes into and comes out of the MLP's nonlinearity, and its product with
    the gate. What stands inside the split matrices is split by tensor parallelism, the rest by sequence parallelism.
    """
    shape, layout, software = setting.shape, setting.layout, setting.software
    tensor = layout.tensor
    outside, inside = 0.0, 0.0
    if layer.attentions or layer.state_space:
        outside += 3 * shape.width
        inside += 2 * shape.query_width + 2 * shape.key_value_width
        if not software.flash:
            inside += 2.5 * shape.heads * setting.work.seq_len  # scores, their softmax, a mask of one byte
        else:
            inside += 2 * shape.heads
    if layer.feed_forward == "dense":
        outside += 3 * shape.width
        inside += (4 if shape.gated else 2) * shape.mlp_width
    if layer.feed_forward == "experts" and shape.mixture is not None:
        mixture = shape.mixture
        outside += 3 * shape.width
        width = mixture.per_token * mixture.width + mixture.shared_width
        inside += (4 if shape.gated else 2) * width + 2 * mixture.per_token * shape.width
    if software.dropout:
        outside += shape.width  # two masks of a byte
    kept = HALF * (outside / (tensor if layout.sequence else 1) + inside / tensor)
    if layout.sequence and tensor > 1:
        kept += HALF * 2 * shape.width * software.keeps_gathered
    return kept


def stage_memory(setting: Setting, stage: int) -> Memory:
    """What the devices of one stage must hold at their fullest moment."""
    shape, layout, software, work = setting.shape, setting.layout, setting.software, setting.work
    held = held_parameters(setting, stage)

    def share(parameters: Held, at: int) -> float:
        return parameters.share(layout.sharers if layout.zero >= at else 1, expert=setting.expert)

    trained = trained_parameters(setting, held)
    weights = share(held, 3) * software.weights
    if work.tuning != "full":
        weights = share(held, 3) * (QUANTISED if work.tuning == "qlora" else HALF) + share(trained, 3) * 4
    parts: dict[str, float] = {
        "weights": weights,
        "gradients": share(trained, 2) * software.gradients,
        "optimizer": share(trained, 1) * software.states,
    }
    tokens = setting.tokens
    flying = in_flight(setting, stage)
    kept = {layer: layer_activations(setting, layer) for layer in setting.blocks[stage]}
    per_token = sum(kept[layer] * count for layer, count in setting.blocks[stage].items())
    sequence = layout.tensor if layout.sequence else 1
    boundary = HALF * shape.width / sequence
    if layout.recompute == "full":
        alive = max(kept.values(), default=0.0)
        parts["activations"] = tokens * (flying * boundary * len(setting.stages[stage]) + alive)
    else:
        parts["activations"] = tokens * flying * per_token
    if stage == 0:
        parts["activations"] += tokens * flying * boundary
    if stage == len(setting.stages) - 1:
        later = software.later_logits * (setting.micro_batches > 1)
        parts["logits"] = tokens * (software.logits + later) * shape.vocabulary / layout.tensor
    parts["buffers"] = _buffers(setting, stage, held.total)
    parts["fragmentation"] = UNMERGED * (parts["activations"] + parts.get("logits", 0.0))
    host = 0.0
    if layout.offload in ("optimizer", "params"):
        host = parts.pop("optimizer")
    return Memory(parts, host, 0.0 if setting.cluster.device.is_cpu else CONTEXT)


def _buffers(setting: Setting, stage: int, parameters: float) -> float:
    """Bytes that communication needs beside: gathered weights of the largest units under ZeRO-3, buckets of DDP."""
    layout, software, shape = setting.layout, setting.software, setting.shape
    if layout.data * layout.context == 1:
        return 0.0
    if layout.zero < 3:
        return 0.0 if layout.zero else min(parameters * 2, 2 * 25 * 2**20)
    tensor, expert = layout.tensor, setting.expert
    kinds = setting.blocks[stage]
    block = max((block_parameters(shape, layer, tensor=tensor, expert=expert).total for layer in kinds), default=0.0)
    outside = max(shape.embedding_parameters, shape.head_matmul().parameters) / layout.tensor
    # Two gathered blocks, the outermost unit, and the gradients of one block before they are scattered.
    return HALF * (2 * block + outside) + software.gradients * block


def in_flight(setting: Setting, stage: int) -> float:
    """Micro-batches whose activations the stage holds at most, counted as passes through all of its blocks."""
    layout, count = setting.layout, setting.micro_batches
    processes = layout.pipeline
    if processes == 1:
        return 1.0
    if layout.schedule == "gpipe":
        return float(count)
    later = processes - stage
    if setting.chunks > 1:
        return min(float(count), later + (processes - 1) * (setting.chunks - 1) / setting.chunks)
    return float(min(count, later))


def peak_memory(setting: Setting) -> tuple[int, Memory]:
    """(stage, memory) of the fullest stage.

    Of stages with the same blocks the earliest holds most micro-batches: only it is looked at, and the two ends.
    """
    found = [(stage, stage_memory(setting, stage)) for stage in _fullest(setting.shape, setting.stages)]
    return max(found, key=lambda pair: pair[1].peak)


@lru_cache(maxsize=4096)
def _fullest(shape: Shape, stages: tuple[range, ...]) -> tuple[int, ...]:
    kinds: dict[object, int] = {}
    for stage in range(1, len(stages) - 1):
        kinds.setdefault(tuple(shape.layer(i) for i in stages[stage]) if shape.pattern else len(stages[stage]), stage)
    return tuple(sorted({0, len(stages) - 1, *kinds.values()}))
