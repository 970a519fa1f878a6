"""The settings that a search considers: every sensible layout of the devices, micro-batch and recomputation.

Tensor parallelism stays inside a node. Pipelines have at least as many micro-batches as processes. A pipeline's stages
have equally many blocks, or numbers of blocks that balance the head's time. Recomputing attention alone gains nothing
where attention saves no scores, so it is considered only on request.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import product

from stoker.hardware.machines.cluster import Cluster
from stoker.job.layout import SHARDS, ContextBy, Layout, Recompute, ScheduleName, Shard
from stoker.job.resolution.batch_solver import divisors
from stoker.job.resolution.island_count import islands_of
from stoker.plan.search_space import Space
from stoker.plan.setting import Setting, TrainingWork
from stoker.plan.shape import Shape
from stoker.plan.software import Software
from stoker.plan.time.pass_times import PassTimes

SCHEDULES: tuple[ScheduleName, ...] = ("1f1b", "interleaved", "zero-bubble", "zbv")
RECOMPUTE: tuple[Recompute, ...] = ("none", "full")
SHORTEST = 1024  # tokens of a row on one process that context parallelism may leave


def root_settings(work: TrainingWork, cluster: Cluster, software: Software, space: Space) -> Iterator[Setting]:
    """Yields the products of axes in a space, with micro-batch and recomputation: what determines the time of passes.

    Args:
        space: may ask for kinds of recomputation that are not searched by default.
    """
    gpus, shape = cluster.gpus, work.shape
    for tensor in divisors(cluster.per_node):
        if tensor > shape.most_tensor:
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
                        root = Setting(work, cluster, spread, micro_batch, software=software)
                        if space.reaches(root):
                            yield root


def _attention(context: int, tensor: int, shape: Shape) -> tuple[ContextBy, ...]:
    """Returns ways to compute attention over a split row: by heads only if every process gets some."""
    return ("gather", "ulysses") if context > 1 and shape.kv_heads % (tensor * context) == 0 else ("gather",)


def variants_of(root: Setting, passes: PassTimes, space: Space) -> Iterator[Setting]:
    """Yields a root with each schedule, division into stages, kind of sharding and offload of a space that Stoker can
    train with.

    Args:
        space: may ask for schedules and offload that are not searched by default.
    """
    return filter(space.has, _variants(root, passes, space))


def _variants(root: Setting, passes: PassTimes, space: Space) -> Iterator[Setting]:
    base = root.layout
    schedules: Collection[ScheduleName] = space.schedule or SCHEDULES
    if base.pipeline == 1:
        schedules = SCHEDULES[:1]  # without effect
    for schedule in schedules:
        scheduled = replace(base, schedule=schedule)
        fills = root.micro_batches >= (2 * base.pipeline - 1 if schedule == "zbv" else base.pipeline)
        if not (fills and scheduled.takes(root.micro_batches) and scheduled.stage_count <= root.shape.layers):
            continue
        even = replace(root, layout=scheduled)
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
