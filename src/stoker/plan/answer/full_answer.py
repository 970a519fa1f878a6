"""Answer to a job and a cluster: the plan with cost, explanation and alternatives; or changes that make one fit."""

from __future__ import annotations

import time
from dataclasses import dataclass

from stoker.hardware.machines.cluster import Cluster
from stoker.plan.answer.alternatives import Alternative, alternatives
from stoker.plan.answer.changes import FittingChange, changes
from stoker.plan.answer.cost import Cost, Length, cost_of
from stoker.plan.answer.explain import Bottleneck, FasterChange, bottlenecks, faster_changes, plan_of
from stoker.plan.answer.picture import StageMemory
from stoker.plan.memory.memory_formulas import Memory, Verdict, stage_memory, verdict_of
from stoker.plan.search import LayoutPlan, SearchResult, search
from stoker.plan.setting import Setting, TrainingWork
from stoker.plan.software import STOKER, Software

SAMPLED = "a step includes its share of sampling, with all answers at their maximum length; rewards are not counted"


@dataclass(frozen=True)
class PlanQuestion:
    """A job and a cluster to plan for.

    Attributes:
        work: of the job.
        cluster: to run on.
        on: the value of ``--on`` that selects the cluster.
        length: of the run.
        software: the training program.
        asked: the layout that the job states; None if it leaves it open or is for another number of devices.
        asked_devices: number of devices of a stated layout that is for another number; None for others.
    """

    work: TrainingWork
    cluster: Cluster
    on: str
    length: Length
    software: Software = STOKER
    asked: Setting | None = None
    asked_devices: int | None = None

    @property
    def notes(self) -> list[str]:
        """Notes on the assumptions of the figures, and on costs that they omit."""
        notes, links = list(self.cluster.notes), self.cluster.measured_links
        if self.asked_devices is not None:
            notes.append(f"the job's own layout has {self.asked_devices} processes, so it is not compared")
        return [*notes, *([links] if links else []), *([SAMPLED] if self.work.rollouts else [])]


@dataclass(frozen=True)
class PlanAnswer:
    """A plan that fits, explained.

    Attributes:
        plan: the fastest.
        stages: memory of each pipeline stage.
        cost: of the run.
        bottlenecks, faster_changes, alternatives: the explanation.
        looked_at: settings of the search.
        seconds: that the search took.
    """

    question: PlanQuestion
    plan: LayoutPlan
    stages: tuple[Memory, ...]
    cost: Cost
    bottlenecks: list[Bottleneck]
    faster_changes: list[FasterChange]
    alternatives: list[Alternative]
    looked_at: int
    seconds: float


@dataclass(frozen=True)
class NothingFits:
    """The answer when no plan fits.

    Attributes:
        nearest: the plan that is nearest to fitting; None if no layout divides the batch over the devices.
        changes: changes that would make one fit, the smallest first.
        looked_at: number of settings in the search.
    """

    question: PlanQuestion
    nearest: LayoutPlan | None
    changes: list[FittingChange]
    looked_at: int


def answer(question: PlanQuestion) -> PlanAnswer | NothingFits:
    """Searches for a plan, and explains the result."""
    begin = time.perf_counter()
    found = search(question.work, question.cluster, software=question.software)
    seconds = time.perf_counter() - begin
    if not found.plans:
        options = changes(question.work, question.cluster, on=question.on, software=question.software)
        return NothingFits(question, found.nearest, options, found.looked_at)
    return _explained(question, found, seconds)


def _explained(question: PlanQuestion, found: SearchResult, seconds: float) -> PlanAnswer:
    plan = found.plans[0]
    better = faster_changes(plan, on=question.on)
    return PlanAnswer(
        question=question,
        plan=plan,
        stages=stages_of_plan(plan),
        cost=cost_of(plan, question.length),
        bottlenecks=bottlenecks(plan, better),
        faster_changes=better,
        alternatives=alternatives(found, asked=plan_of(question.asked) if question.asked else None),
        looked_at=found.looked_at,
        seconds=seconds,
    )


def stages_of_plan(plan: LayoutPlan) -> tuple[Memory, ...]:
    """Memory of each pipeline stage, first to last."""
    return tuple(stage_memory(plan.setting, stage) for stage in range(plan.setting.layout.pipeline))


def verdict(memory: Memory, plan: LayoutPlan) -> Verdict:
    """Returns whether a stage's memory fits a device of the plan."""
    return verdict_of(memory.peak, memory.upper, plan.capacity)


def memory_owner_name(plan: LayoutPlan) -> str:
    """Name of the unit of a pipeline's memory: a stage, or a process with several stages."""
    return "process" if plan.setting.layout.stages_per_process > 1 else "stage"


def stage_memory_bars(plan: LayoutPlan, stages: tuple[Memory, ...]) -> list[StageMemory]:
    """Memory of the stages for the pictures, components in one order, the largest first."""
    most: dict[str, float] = {}
    for memory in stages:
        for part, size in memory.parts.items():
            most[part] = max(size, most.get(part, 0.0))
    order = sorted((part for part in most if most[part] > 0), key=lambda part: -most[part])
    several = len(stages) > 1
    return [
        StageMemory(
            f"{memory_owner_name(plan)} {number}" if several else "each device",
            {part: memory.parts.get(part, 0.0) for part in order},
            memory.upper,
        )
        for number, memory in enumerate(stages, start=1)
    ]
