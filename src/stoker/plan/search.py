"""Searches for the fastest setting that fits, ordered by a lower bound so that most settings are skipped."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from stoker.hardware.machines.cluster import Cluster
from stoker.job.layout import Layout
from stoker.plan.candidates import root_settings, variants_of
from stoker.plan.memory.memory_formulas import Memory, allocatable_bytes, peak_memory
from stoker.plan.search_space import EVERYTHING, Space
from stoker.plan.setting import Setting, TrainingWork
from stoker.plan.software import STOKER, Software
from stoker.plan.time.pass_times import PassTimes
from stoker.plan.time.speed import Speed, speed_of
from stoker.plan.time.step_time import StepTime, step_time

KEPT = 20  # of the fastest plans
TIE = 0.03  # share of a step below which predictions tell no difference


@dataclass(frozen=True)
class LayoutPlan:
    """A setting with its memory and time.

    Attributes:
        stage: of the pipeline, the one that needs most memory.
        memory: of that stage.
        time: of a step.
        capacity: bytes that a device has for it.
    """

    setting: Setting
    stage: int
    memory: Memory
    time: StepTime
    capacity: float

    @property
    def fits(self) -> bool:
        """Returns whether the upper bound fits the device, and the offloaded states fit the host."""
        host = self.setting.cluster.host_memory_gib_per_gpu * 2**30
        return self.memory.upper <= self.capacity and self.memory.host <= host

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.time.total

    @property
    def speed(self) -> Speed:
        """Tokens per second, and the share of the devices' peak."""
        return speed_of(self.setting, self.seconds)


@dataclass(frozen=True)
class SearchResult:
    """Result of a search.

    Attributes:
        plans: the fastest ones that fit, fastest first, except that a simpler one within 3 % comes first.
        nearest: of those that do not fit, the one that comes nearest to it; None if one fits.
        looked_at: settings in all.
    """

    plans: tuple[LayoutPlan, ...]
    nearest: LayoutPlan | None
    looked_at: int


def search(
    work: TrainingWork,
    cluster: Cluster,
    *,
    software: Software = STOKER,
    space: Space = EVERYTHING,
    kept: int = KEPT,
) -> SearchResult:
    """Returns the fastest settings that fit.

    Settings that differ only in communication share the time of their passes, which is a lower bound of each.
    They are evaluated in order of this bound, until the next bound exceeds the slowest plan kept: no later setting
    can win. If nothing fits, everything is evaluated. A setting that fits is not offloaded. On a processor,
    where that frees no memory, offload is considered only if the space asks for it.

    Args:
        space: the settings to search.
        kept: number of plans to return.
    """
    passes = PassTimes()
    if cluster.device.is_cpu and space.offload is None:
        space = replace(space, offload={"none"})
    has_plain = space.offload is None or "none" in space.offload
    roots = [(passes.least(root), root) for root in root_settings(work, cluster, software, space)]
    best = _Best(kept, allocatable_bytes(cluster), passes)
    looked_at = 0
    settled = False  # offloading would only be slower
    for least, root in sorted(roots, key=lambda pair: pair[0]):
        if least >= best.limit:
            break
        for setting in variants_of(root, passes, space):
            looked_at += 1
            if not (settled and has_plain) or setting.layout.offload == "none":
                settled = best.consider(setting)
    return SearchResult(best.in_order(), None if best.plans else best.nearest, looked_at)


class _Best:
    """The best plans of the settings considered so far.

    Attributes:
        plans: the fastest that fit, fastest first.
        nearest: of those that do not fit, the one that comes nearest to it.
        limit: seconds of a step; slower plans are discarded.
    """

    def __init__(self, kept: int, capacity: float, passes: PassTimes) -> None:
        self.plans: list[LayoutPlan] = []
        self.nearest: LayoutPlan | None = None
        self.limit = inf
        self._kept, self._capacity, self._passes = kept, capacity, passes
        self._simplest: dict[int, LayoutPlan] = {}  # the fastest plan that fits, by complexity of the layout

    def consider(self, setting: Setting) -> bool:
        """Keeps the plan of a setting if it is one of the best; returns whether it fits, or is too slow already."""
        plans, nearest, capacity = self.plans, self.nearest, self._capacity
        time = step_time(setting, passes=self._passes) if self.limit < inf else None
        if time is not None and time.total >= self.limit:
            return True
        stage, memory = peak_memory(setting, too_much=capacity if plans else inf)
        if memory.upper > capacity and (plans or (nearest and memory.upper >= nearest.memory.upper)):
            return False
        plan = LayoutPlan(setting, stage, memory, time or step_time(setting, passes=self._passes), capacity)
        if plan.fits:
            self._keep(plan)
        elif nearest is None or memory.upper < nearest.memory.upper:
            self.nearest = plan
        return plan.fits

    def _keep(self, plan: LayoutPlan) -> None:
        self.plans = sorted([*self.plans, plan], key=lambda plan: plan.seconds)[: self._kept]
        parts = _parts(plan.setting.layout)
        self._simplest[parts] = min(plan, self._simplest.get(parts, plan), key=lambda plan: plan.seconds)
        if len(self.plans) == self._kept:
            self.limit = max(self.plans[-1].seconds, self.plans[0].seconds * (1 + TIE))

    def in_order(self) -> tuple[LayoutPlan, ...]:
        """Returns the plans: the simplest of those within `TIE` of the fastest, then the others, fastest first."""
        if not self.plans:
            return ()
        slowest = self.plans[0].seconds * (1 + TIE)
        chosen = self._simplest[min(parts for parts, plan in self._simplest.items() if plan.seconds <= slowest)]
        return chosen, *(plan for plan in self.plans if plan is not chosen)


def _parts(layout: Layout) -> int:
    """Complexity of a layout: its axes, and the options chosen within them."""
    axes = (layout.data > 1) + 2 * sum(size > 1 for size in (layout.tensor, layout.pipeline, layout.context))
    more = (
        layout.zero > 1, layout.zero > 0 and layout.shard_size < layout.data, layout.stages is not None,
        layout.pipeline > 1 and layout.schedule != "1f1b", layout.recompute != "none", layout.offload != "none",
    )  # fmt: skip
    return axes + sum(more)
