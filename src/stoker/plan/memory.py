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
from stoker.plan.eager_memory import eager_parts
from stoker.plan.held import Held, block_parameters, held_parameters, packed_parameters, trained_parameters
from stoker.plan.setting import PACKED_BYTES, Setting
from stoker.plan.shape import Shape

CONTEXT = 1.5 * 2**30  # bytes that a GPU's context and the communication library's buffers take from every process
BUCKETS = 2 * 25 * 2**20  # bytes of the two buckets that DDP fills and sums
# What the upper bound adds: model states are known, what passes leave and the allocator's gaps are not. So much covers
# 88 % of the published runs; docs/planner.md has the table.
STATES = ("weights", "gradients", "optimizer", "process")
STATES_BOUND, REST_BOUND = 0.03, 0.20


def context_bytes(cluster: Cluster) -> float:
    """What a device's context takes beside what the program allocates."""
    return 0.0 if cluster.device.is_cpu else CONTEXT


def room(cluster: Cluster) -> float:
    """Bytes of a device that a program may allocate."""
    return max(0.0, cluster.device.memory_gib * 2**30 - context_bytes(cluster))


@dataclass(frozen=True)
class Memory:
    """Bytes on the devices of one stage of the pipeline.

    Attributes:
        parts: by component: weights, gradients, optimizer, activations, logits, buffers, fragmentation.
        host: bytes in the host's memory, per device.
        moment: of the step, at which so much is held.
    """

    parts: Mapping[str, float]
    host: float = 0.0
    moment: str = ""

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


def stage_memory(setting: Setting, stage: int) -> Memory:
    """What the devices of one process of the pipeline, all its stages, must hold at their fullest moment."""
    layout, work = setting.layout, setting.work
    if setting.software.eager:
        parts, moment = eager_parts(setting, stage)
    else:
        parts, moment = _fused_parts(setting, stage), "the end of the forward pass"
    moved = {"none": (), "optimizer": ("optimizer",), "params": ("weights", "gradients", "optimizer")}[layout.offload]
    host = sum(parts.pop(part, 0.0) for part in moved)
    correction = setting.cluster.correction(work.precision, work.tuning)
    if correction is not None:
        parts = correction.memory_parts(parts)
    return Memory(parts, host, moment)


def _fused_parts(setting: Setting, stage: int) -> dict[str, float]:
    """By component, of programs with fused kernels that keep the sums of gradients from step to step."""
    shape, layout, software, work = setting.shape, setting.layout, setting.software, setting.work
    held = held_parameters(setting, stage)

    def share(parameters: Held, at: int) -> float:
        return parameters.share(layout.sharers if layout.zero >= at else 1, expert=setting.expert)

    trained = trained_parameters(setting, held)
    weights = share(held, 3) * software.weights
    if work.tuning != "full":
        packed = packed_parameters(setting, stage)
        frozen = HALF if packed else software.frozen
        rest = Held(held.dense - packed, held.experts)
        weights = share(Held(packed), 3) * PACKED_BYTES.get(work.base, 0.0) + share(rest, 3) * frozen
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
    if software.late is not None and layout.sequence:
        parts["freed late"] = late_freed(setting, software.late, stage, others=sum(parts.values()))
    return parts


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
