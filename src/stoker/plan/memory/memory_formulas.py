"""Memory of a device by component: the formulas of `docs/planner.md`.

Sources: Rajbhandari et al., 2020 (model states under ZeRO, section 3.1 and 5); Korthikanti et al., 2022 (activations
under tensor and sequence parallelism, section 4; recomputation, section 5); Dao et al., 2022 (attention that keeps no
scores); Narayanan et al., 2021 (micro-batches in flight).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import Literal

from stoker.hardware.machines.cluster import Cluster
from stoker.hardware.measured.planner_correction import STATES
from stoker.plan.memory.rollout_memory import rollout_parts
from stoker.plan.memory.stoker_memory import IDLE, REFERENCE, eager_parts
from stoker.plan.setting import Setting
from stoker.plan.shape import Shape

CONTEXT = 1.5 * 2**30  # bytes of a GPU's context and the communication library's buffers, for every process
# Margins of the upper bound: model states are exact, activations and the allocator's gaps are not. These fractions
# cover 88 % of the published runs; docs/planner.md has the table.
OFFLOADED = {
    "none": (),
    "optimizer": ("optimizer", "host copies"),
    "params": ("weights", "gradients", "optimizer", "outer step"),
    "activations": ("activations on the host",),
}
STATES_BOUND, REST_BOUND = 0.03, 0.20
Verdict = Literal["FITS", "AT RISK", "DOES NOT FIT"]


def verdict_of(peak: float, upper: float, capacity: float) -> Verdict:
    """Verdict on a peak and its upper bound, in bytes: it fits only if the bound does."""
    if upper <= capacity:
        return "FITS"
    return "AT RISK" if peak <= capacity else "DOES NOT FIT"


def context_bytes(cluster: Cluster) -> float:
    """Returns bytes of a device's context, in addition to the program's allocations."""
    return 0.0 if cluster.device.is_cpu else CONTEXT


def allocatable_bytes(cluster: Cluster) -> float:
    """Bytes of a device that a program may allocate."""
    return max(0.0, cluster.device.memory_gib * 2**30 - context_bytes(cluster))


@dataclass(frozen=True)
class Memory:
    """Bytes on the devices of one stage of the pipeline.

    Attributes:
        parts: by component: weights, gradients, optimizer, activations, logits, buffers, fragmentation.
        host: bytes in the memory of a GPU's host, per device.
        moment: of the step, at which the peak occurs.
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
        """Upper bound of the peak."""
        states = sum(self.parts.get(part, 0.0) for part in STATES)
        return states * (1 + STATES_BOUND) + (self.peak - states) * (1 + REST_BOUND)


def stage_memory(setting: Setting, stage: int) -> Memory:
    """Returns the peak memory of a device of one pipeline process, with all of its stages."""
    layout, work = setting.layout, setting.work
    if setting.software.memory is None:
        moments = [eager_parts(setting, stage)]
        moments += rollout_parts(setting, stage, moments[0][0], capacity=allocatable_bytes(setting.cluster))
    else:
        moments = [(dict(setting.software.memory(setting, stage)), "the end of the forward pass")]
    away = (
        () if setting.cluster.device.is_cpu else (*OFFLOADED[layout.offload], REFERENCE, IDLE)
    )  # a CPU has one memory
    hosts = [sum(parts.pop(part, 0.0) for part in away) for parts, _ in moments]
    host = max(hosts)
    parts, moment = max(moments, key=lambda found: sum(found[0].values()))
    correction = setting.cluster.correction(work.precision, work.tuning)
    if correction is not None:
        parts = correction.memory_parts(parts)
    return Memory(parts, host, moment)


def peak_memory(setting: Setting, *, too_much: float = inf) -> tuple[int, Memory]:
    """Returns (process of the pipeline, memory) of the fullest one.

    Only the two ends, and the earliest of several processes with the same blocks, are computed: the earliest has the
    most micro-batches in flight.

    Args:
        too_much: bytes; the first process whose upper bound exceeds them is returned, the fullest or not.
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
