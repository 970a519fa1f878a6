"""The fastest setting that fits: all that can be, in an order that lets most of them go unlooked at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from stoker.hardware.cluster import Cluster
from stoker.job.layout import SHARDS, Layout, Recompute, ScheduleName
from stoker.plan.memory import Memory, peak_memory
from stoker.plan.setting import Setting, Work
from stoker.plan.software import STOKER, Software
from stoker.plan.space import EVERYTHING, Space
from stoker.plan.step_time import Passes, StepTime, step_time

SCHEDULES: tuple[ScheduleName, ...] = ("1f1b", "interleaved", "zero-bubble", "zbv")
RECOMPUTE: tuple[Recompute, ...] = ("none", "full")
SHORTEST = 1024  # tokens of a row on one process that context parallelism may leave
KEPT = 20  # of the fastest plans


@dataclass(frozen=True)
class Plan:
    """A setting with what it takes.

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
        """Whether the upper bound stays within the device, and what is offloaded within the host."""
        host = self.setting.cluster.host_memory_gib_per_gpu * 2**30
        return self.memory.upper <= self.capacity and self.memory.host <= host

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.time.total


@dataclass(frozen=True)
class Found:
    """What a search gave.

    Attributes:
        plans: the fastest ones that fit, fastest first.
        nearest: of those that do not fit, the one that comes nearest to it; None where one fits.
        looked_at: settings in all.
    """

    plans: tuple[Plan, ...]
    nearest: Plan | None
    looked_at: int


def search(
    work: Work,
    cluster: Cluster,
    *,
    software: Software = STOKER,
    offload: bool = True,
    space: Space = EVERYTHING,
    kept: int = KEPT,
) -> Found:
    """The fastest settings that fit.

    Settings that differ only in what communicates share the time of their passes, which is the least that each takes.
    They are looked at in that order, until the least of the next ones is more than the slowest plan kept takes: what
    is left cannot win. Where nothing fits everything is looked at.

    Args:
        space: what is looked at, of all that there is.
        kept: how many plans are given.
    """
    passes = Passes()
    roots = [(passes.least(root), root) for root in _roots(work, cluster, software) if space.reaches(root)]
    plans: list[Plan] = []
    nearest: Plan | None = None
    looked_at = 0
    for least, root in sorted(roots, key=lambda pair: pair[0]):
        if len(plans) == kept and least >= plans[-1].seconds:
            break
        for setting in filter(space.has, _variants(root, offload)):
            looked_at += 1
            stage, memory = peak_memory(setting)
            capacity = cluster.device.memory_gib * 2**30 - memory.outside
            if memory.upper > capacity and (plans or (nearest and memory.upper >= nearest.memory.upper)):
                continue
            plan = Plan(setting, stage, memory, step_time(setting, passes=passes), capacity)
            if plan.fits:
                plans = sorted([*plans, plan], key=lambda plan: plan.seconds)[:kept]
            elif nearest is None or memory.upper < nearest.memory.upper:
                nearest = plan
    return Found(tuple(plans), None if plans else nearest, looked_at)


def settings(work: Work, cluster: Cluster, *, software: Software, offload: bool) -> Iterator[Setting]:
    """Every setting that Stoker can train with and that could be sensible.

    Tensor parallelism stays inside a node. Pipelines have at least as many micro-batches as processes. Recomputation
    of attention alone gains nothing where attention keeps no scores.
    """
    for root in _roots(work, cluster, software):
        yield from filter(EVERYTHING.has, _variants(root, offload))


def _roots(work: Work, cluster: Cluster, software: Software) -> Iterator[Setting]:
    """Products of axes, with micro-batch and recomputation: what the passes depend on."""
    gpus, shape = cluster.gpus, work.shape
    for tensor in divisors(min(cluster.per_node, shape.kv_heads)):
        for pipeline in divisors(gpus // tensor) if gpus % tensor == 0 else ():
            if pipeline > shape.layers:
                continue
            for context in divisors(gpus // tensor // pipeline):
                if work.seq_len % (2 * context) or (context > 1 and work.seq_len // context < SHORTEST):
                    continue
                data = gpus // tensor // pipeline // context
                if work.global_batch % data:
                    continue
                layout = Layout(data=data, tensor=tensor, sequence=tensor > 1, pipeline=pipeline, context=context)
                for recompute in RECOMPUTE:
                    spread = replace(layout, recompute=recompute)
                    for micro_batch in divisors(work.global_batch // data):
                        yield Setting(work, cluster, spread, micro_batch, software=software)


def _variants(root: Setting, offload: bool) -> Iterator[Setting]:
    """Kinds of sharding, schedules and offload of a product of axes."""
    base, cluster = root.layout, root.cluster
    schedules: tuple[ScheduleName, ...] = SCHEDULES if base.pipeline > 1 else ("1f1b",)
    near = max(1, cluster.per_node // base.tensor // base.context)
    for shard in SHARDS if base.data * base.context > 1 else ("none",):
        hybrid = shard != "none" and 1 < near < base.data and base.data % near == 0
        sizes = {base.data, near} if hybrid else {base.data}
        for size in sorted(sizes) if shard != "none" else (1,):
            for schedule in schedules:
                layout = replace(base, shard=shard, shard_size=size, schedule=schedule)
                if not layout.takes(root.micro_batches) or layout.stage_count > root.shape.layers:
                    continue
                setting = replace(root, layout=layout, chunks=layout.stages_per_process)
                yield setting
                if offload and shard != "none":
                    yield replace(setting, layout=replace(layout, offload="optimizer"))


def divisors(number: int) -> list[int]:
    """In ascending order."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
