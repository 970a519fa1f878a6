"""Searches for the fastest setting that fits, ordered by a lower bound so that most settings are skipped."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import inf

from stoker.hardware.cluster import Cluster
from stoker.job.batch_solver import divisors
from stoker.job.island_count import islands_of
from stoker.job.layout import SHARDS, ContextBy, Layout, Recompute, ScheduleName, Shard
from stoker.plan.memory_formulas import Memory, allocatable_bytes, peak_memory
from stoker.plan.pass_times import PassTimes
from stoker.plan.search_space import EVERYTHING, Space
from stoker.plan.setting import Setting, TrainingWork
from stoker.plan.shape import Shape
from stoker.plan.software import STOKER, Software
from stoker.plan.speed import Speed, speed_of
from stoker.plan.step_time import StepTime, step_time

SCHEDULES: tuple[ScheduleName, ...] = ("1f1b", "interleaved", "zero-bubble", "zbv")
RECOMPUTE: tuple[Recompute, ...] = ("none", "full")
SHORTEST = 1024  # tokens of a row on one process that context parallelism may leave
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
    capacity = allocatable_bytes(cluster)
    roots = [(passes.least(root), root) for root in _roots(work, cluster, software, space) if space.reaches(root)]
    plans: list[LayoutPlan] = []
    nearest: LayoutPlan | None = None
    looked_at = 0
    simplest: dict[int, LayoutPlan] = {}  # the fastest plan, by complexity of the layout
    limit = inf  # seconds; slower plans are discarded
    settled = False  # offloading would only be slower: it fits without, or is too slow already
    has_plain = space.offload is None or "none" in space.offload
    for least, root in sorted(roots, key=lambda pair: pair[0]):
        if least >= limit:
            break
        for setting in filter(space.has, _variants(root, passes, space)):
            looked_at += 1
            if setting.layout.offload == "none":
                settled = False
            elif settled and has_plain:
                continue
            time = step_time(setting, passes=passes) if limit < inf else None
            if time is not None and time.total >= limit:
                settled = True
                continue
            stage, memory = peak_memory(setting, too_much=capacity if plans else inf)
            if memory.upper > capacity and (plans or (nearest and memory.upper >= nearest.memory.upper)):
                continue
            plan = LayoutPlan(setting, stage, memory, time or step_time(setting, passes=passes), capacity)
            if plan.fits:
                settled = True
                plans = sorted([*plans, plan], key=lambda plan: plan.seconds)[:kept]
                parts = _parts(setting.layout)
                simplest[parts] = min(plan, simplest.get(parts, plan), key=lambda plan: plan.seconds)
                limit = max(plans[-1].seconds, plans[0].seconds * (1 + TIE)) if len(plans) == kept else inf
            elif nearest is None or memory.upper < nearest.memory.upper:
                nearest = plan
    if plans:  # the simplest of those within TIE of the fastest comes first
        ties = [parts for parts, plan in simplest.items() if plan.seconds <= plans[0].seconds * (1 + TIE)]
        chosen = simplest[min(ties)]
        plans = [chosen, *(plan for plan in plans if plan is not chosen)]
    return SearchResult(tuple(plans), None if plans else nearest, looked_at)


def _parts(layout: Layout) -> int:
    """Complexity of a layout: its axes, and the options chosen within them."""
    axes = (layout.data > 1) + 2 * sum(size > 1 for size in (layout.tensor, layout.pipeline, layout.context))
    more = (
        layout.zero > 1, layout.zero > 0 and layout.shard_size < layout.data, layout.stages is not None,
        layout.pipeline > 1 and layout.schedule != "1f1b", layout.recompute != "none", layout.offload != "none",
    )  # fmt: skip
    return axes + sum(more)


def feasible_settings(work: TrainingWork, cluster: Cluster, *, software: Software) -> Iterator[Setting]:
    """Yields every setting that Stoker can train with and that could be sensible.

    Tensor parallelism stays inside a node. Pipelines have at least as many micro-batches as processes. Recomputing
    attention alone gains nothing where attention saves no scores. A pipeline's stages have equally many blocks, or
    numbers of blocks that balance the head's time.
    """
    passes = PassTimes()
    for root in _roots(work, cluster, software, EVERYTHING):
        yield from filter(EVERYTHING.has, _variants(root, passes, EVERYTHING))


def _roots(work: TrainingWork, cluster: Cluster, software: Software, space: Space) -> Iterator[Setting]:
    """Yields products of axes, with micro-batch and recomputation, which determine the time of the passes.

    Args:
        space: may ask for kinds of recomputation that are not searched by default.
    """
    gpus, shape = cluster.gpus, work.shape
    for tensor in divisors(cluster.per_node):
        if tensor > shape.kv_heads:
            continue
        for pipeline in divisors(gpus // tensor) if gpus % tensor == 0 else ():
            if pipeline > shape.layers:
                continue
            for context in divisors(gpus // tensor // pipeline):
                # Each process of a split row has two equal pieces of it.
                if context > 1 and (work.seq_len % (2 * context) or work.seq_len // context < SHORTEST):
                    continue
                data = gpus // tensor // pipeline // context
                if work.global_batch % data:
                    continue
                layout = Layout(data=data, tensor=tensor, sequence=tensor > 1, pipeline=pipeline, context=context)
                for by, recompute in product(_attention(context, tensor, shape), space.recompute or RECOMPUTE):
                    spread = replace(layout, context_by=by, recompute=recompute)
                    for micro_batch in divisors(work.global_batch // data):
                        yield Setting(work, cluster, spread, micro_batch, software=software)


def _attention(context: int, tensor: int, shape: Shape) -> tuple[ContextBy, ...]:
    """Returns ways to compute attention over a split row: by heads only if every process gets some."""
    return ("gather", "ulysses") if context > 1 and shape.kv_heads % (tensor * context) == 0 else ("gather",)


def _variants(root: Setting, passes: PassTimes, space: Space) -> Iterator[Setting]:
    """Kinds of sharding, schedules, stages and offload of a product of axes.

    Args:
        space: may ask for schedules that are not searched by default.
    """
    base = root.layout
    schedules: Collection[ScheduleName] = space.schedule or SCHEDULES
    if base.pipeline == 1:
        schedules = SCHEDULES[:1]  # without effect
    for schedule in schedules:
        scheduled = replace(base, schedule=schedule)
        fills = root.micro_batches >= (2 * base.pipeline - 1 if schedule == "zbv" else base.pipeline)
        if not (fills and scheduled.takes(root.micro_batches) and scheduled.stage_count <= root.shape.layers):
            continue
        even = replace(root, layout=scheduled, chunks=scheduled.stages_per_process)
        for sizes in dict.fromkeys((None, _equally_slow(even, passes))):
            for shard, size in _shards(root):
                layout = _with_islands(replace(scheduled, stages=sizes, shard=shard, shard_size=size), root)
                setting = replace(even, layout=layout)
                yield setting
                if shard != "none" or base.data * base.context == 1:
                    yield replace(setting, layout=replace(layout, offload="optimizer"))
                # Beside full recomputation, or where it is asked for: it has not been measured.
                if base.pipeline == 1 and (base.recompute == "full" or space.offload is not None):
                    yield replace(setting, layout=replace(layout, offload="activations"))
                if shard == "zero3":
                    yield replace(setting, layout=replace(layout, offload="params"))


def _with_islands(layout: Layout, root: Setting) -> Layout:
    """Returns the layout with the islands of the work, if its replicas can form any."""
    work = root.work
    if work.sync_every == 1:
        return layout
    islands = work.islands or islands_of(layout.replicas, root.cluster.nodes)
    return replace(layout, islands=1 if layout.replicas % islands else islands, sync_every=work.sync_every)


def _shards(root: Setting) -> Iterator[tuple[Shard, int]]:
    """Yields (kind, processes of a copy): sharding over all data-parallel processes, or over those of a node."""
    layout = root.layout
    yield "none", 1
    near = max(1, root.cluster.per_node // layout.tensor // layout.context)
    for shard in SHARDS[1:] if layout.data * layout.context > 1 else ():
        if 1 < near < layout.data and layout.data % near == 0:
            yield shard, near
        yield shard, layout.data


def _equally_slow(setting: Setting, passes: PassTimes) -> tuple[int, ...] | None:
    """Returns numbers of blocks that make the stages equally slow: the last stage has fewer, by the time of the head;
    None if that changes nothing, or blocks differ.
    """
    count, layers = len(setting.stages), setting.shape.layers
    kinds, head = passes.of(setting)
    if count == 1 or len(kinds) > 1:
        return None
    block = next(iter(kinds.values()))
    heads = head.total / block.total
    last = max(1, round((layers + heads) / count - heads))
    rest, more = divmod(layers - last, count - 1)
    sizes = (*(rest + (i < more) for i in range(count - 1)), last)
    return None if max(map(len, setting.stages)) == rest + (more > 0) and heads < 1 else sizes
