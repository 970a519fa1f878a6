"""What a device must hold, by component: the formulas of `docs/planner.md`.

Sources: Rajbhandari et al., 2020 (model states under ZeRO, section 3.1 and 5); Korthikanti et al., 2022 (activations
under tensor and sequence parallelism, section 4; recomputation, section 5); Dao et al., 2022 (attention that keeps no
scores); Narayanan et al., 2021 (micro-batches in flight).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import inf

from stoker.hardware.cluster import Cluster
from stoker.job.layout import SHARDS, Shard
from stoker.plan.activations import HALF, late_freed, stage_activations
from stoker.plan.setting import Setting
from stoker.plan.shape import Layer, Shape

QUANTISED = 0.55  # bytes of a 4-bit number with its share of the scales
CONTEXT = 1.5 * 2**30  # bytes that a GPU's context and the communication library's buffers take from every process
BUCKETS = 2 * 25 * 2**20  # bytes of the two buckets that DDP fills and sums
# What the upper bound adds: model states are known, what passes leave and the allocator's gaps are not. So much covers
# 88 % of the published runs; docs/planner.md has the table.
STATES = ("weights", "gradients", "optimizer")
STATES_BOUND, REST_BOUND = 0.03, 0.20


def context_bytes(cluster: Cluster) -> float:
    """What a device's context takes beside what the program allocates."""
    return 0.0 if cluster.device.is_cpu else CONTEXT


def room(cluster: Cluster) -> float:
    """Bytes of a device that a program may allocate."""
    return cluster.device.memory_gib * 2**30 - context_bytes(cluster)


@dataclass(frozen=True)
class Memory:
    """Bytes on the devices of one stage of the pipeline.

    Attributes:
        parts: by component: weights, gradients, optimizer, activations, logits, buffers, fragmentation.
        host: bytes in the host's memory, per device.
    """

    parts: Mapping[str, float]
    host: float = 0.0

    @property
    def peak(self) -> float:
        """The point estimate."""
        return sum(self.parts.values())

    @property
    def upper(self) -> float:
        """What should not be exceeded."""
        states = sum(self.parts.get(part, 0.0) for part in STATES)
        return states * (1 + STATES_BOUND) + (self.peak - states) * (1 + REST_BOUND)


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
    """Parameters of a process of the pipeline."""
    return _held_by_all(setting)[stage]


def trained_parameters(setting: Setting, held: Held) -> Held:
    """Of those that a process holds; under adapters, its part of theirs."""
    if setting.work.tuning == "full":
        return held
    adapters = setting.shape.lora_parameters(setting.work.rank)
    return Held(adapters / setting.layout.tensor / setting.layout.pipeline)


def most_held(setting: Setting) -> Held:
    """Of the stage with most parameters."""
    return max(_held_by_all(setting), key=lambda held: held.total)


def _held_by_all(setting: Setting) -> tuple[Held, ...]:
    return _held(setting.shape, setting.stages, setting.homes, setting.layout.tensor, setting.expert)


@lru_cache(maxsize=4096)
def _held(
    shape: Shape, stages: tuple[range, ...], homes: tuple[tuple[int, ...], ...], tensor: int, expert: int
) -> tuple[Held, ...]:
    kinds = {shape.layer(i) for i in range(shape.layers)}
    sizes = {layer: block_parameters(shape, layer, tensor=tensor, expert=expert) for layer in kinds}
    dense = [sum(sizes[shape.layer(i)].dense for i in stage) for stage in stages]
    experts = [sum(sizes[shape.layer(i)].experts for i in stage) for stage in stages]
    dense[0] += shape.embedding_parameters / tensor
    dense[-1] += shape.final_norm_parameters + shape.head_parameters / tensor
    ends_apart = not any(0 in own and len(stages) - 1 in own for own in homes)
    if shape.tied and ends_apart:  # a copy of the embedding
        dense[-1] += shape.head_matmul().parameters / tensor
    return tuple(Held(sum(dense[stage] for stage in own), sum(experts[stage] for stage in own)) for own in homes)


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


def stage_memory(setting: Setting, stage: int) -> Memory:
    """What the devices of one process of the pipeline, all its stages, must hold at their fullest moment."""
    shape, layout, software, work = setting.shape, setting.layout, setting.software, setting.work
    held = held_parameters(setting, stage)

    def share(parameters: Held, at: int) -> float:
        return parameters.share(layout.sharers if layout.zero >= at else 1, expert=setting.expert)

    trained = trained_parameters(setting, held)
    weights = share(held, 3) * software.weights
    if work.tuning != "full":
        weights = share(held, 3) * (QUANTISED if work.tuning == "qlora" else software.frozen) + share(trained, 3) * 4
    parts: dict[str, float] = {
        "weights": weights,
        "gradients": share(trained, 2) * software.gradients,
        "optimizer": share(trained, 1) * software.states,
    }
    parts["activations"] = stage_activations(setting, stage)
    if stage == setting.last:
        later = software.later_logits * (setting.micro_batches > 1)
        parts["logits"] = setting.tokens * (software.logits + later) * shape.vocabulary / layout.tensor
    parts["buffers"] = _buffers(setting, stage, held.total)
    if software.late is not None and layout.sequence:
        parts["freed late"] = late_freed(setting, software.late, stage, others=sum(parts.values()))
    moved = {"none": (), "optimizer": ("optimizer",), "params": ("weights", "gradients", "optimizer")}[layout.offload]
    host = sum(parts.pop(part) for part in moved)
    correction = setting.cluster.correction(work.precision, work.tuning)
    if correction is not None:
        parts = correction.memory_parts(parts)
    return Memory(parts, host)


def _buffers(setting: Setting, stage: int, parameters: float) -> float:
    """Bytes beside: gradients that are not summed yet, gathered weights of the largest units under ZeRO-3, DDP's
    buckets."""
    layout, software, shape = setting.layout, setting.software, setting.shape
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


def peak_memory(setting: Setting, *, too_much: float = inf) -> tuple[int, Memory]:
    """(process of the pipeline, memory) of the fullest one.

    Of processes with the same blocks the earliest holds most micro-batches: only it is looked at, and the two ends.

    Args:
        too_much: bytes; a process whose upper bound is beyond them is given as it is found, the fullest or not.
    """
    fullest: tuple[int, Memory] | None = None
    for at in _fullest(setting.shape, setting.stages, setting.homes):
        memory = stage_memory(setting, at)
        if fullest is None or memory.peak > fullest[1].peak:
            fullest = at, memory
        if memory.upper > too_much:
            return at, memory
    assert fullest is not None
    return fullest


@lru_cache(maxsize=4096)
def _fullest(shape: Shape, stages: tuple[range, ...], homes: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    kinds: dict[object, int] = {}
    for at in range(1, len(homes) - 1):
        own = [stages[stage] for stage in homes[at]]
        kind = tuple(shape.layer(i) for stage in own for i in stage) if shape.pattern else tuple(map(len, own))
        kinds.setdefault(kind, at)
    return tuple(sorted({0, len(homes) - 1, *kinds.values()}))
