"""Explanation of a plan: its bottlenecks, and the gains of changes, each from a search with one thing changed."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from stoker.hardware.machines.cluster import Cluster
from stoker.plan.answer.setting_to_yaml import cluster_words, fuller_nodes
from stoker.plan.answer.time_breakdown import (
    BUBBLE,
    CONTEXT,
    DATA,
    EXPERT,
    LAUNCH,
    RECOMPUTE,
    SENDS,
    TENSOR,
    TRAFFIC,
    UNEVEN,
    Cause,
    causes_of,
)
from stoker.plan.memory.memory_formulas import allocatable_bytes, peak_memory
from stoker.plan.search import LayoutPlan, search
from stoker.plan.search_space import Space, trainable
from stoker.plan.setting import Setting, TrainingWork
from stoker.plan.time.step_time import ROLLOUTS, step_time

MEMORY = "memory"
# The resource of each cause; small products are arithmetic at a lower rate.
RESOURCES = {
    TENSOR: "link", CONTEXT: "link", EXPERT: "link", DATA: "link", SENDS: "link",
    BUBBLE: "bubble", UNEVEN: "bubble", LAUNCH: "launch", TRAFFIC: "memory bandwidth", RECOMPUTE: "recomputation",
}  # fmt: skip
TWICE_MEMORY = "twice the memory of a device"
WORTH = 0.005  # gain in tokens/s below which a change is not reported


@dataclass(frozen=True)
class Bottleneck:
    """One of the resources that limit a plan's speed.

    Attributes:
        resource: compute, link, bubble, launch, memory bandwidth, recomputation, optimizer, rollouts; or memory, if
            it is too small for a faster plan.
        seconds: of the step, spent on it; for memory, the saving with twice as much.
        causes: its parts, the largest first.
    """

    resource: str
    seconds: float
    causes: tuple[Cause, ...]


@dataclass(frozen=True)
class FasterChange:
    """A change, and its gain.

    Attributes:
        change: described for people.
        words: how to write it; empty if it cannot be written.
        plan: the best one with it.
        gain: in tokens/s, 0.1 for 10 % more.
        gain_per_device: in tokens/s per device, which equals that in tokens per price.
    """

    change: str
    words: str
    plan: LayoutPlan
    gain: float
    gain_per_device: float


def plan_of(setting: Setting) -> LayoutPlan:
    """Returns the plan of a setting, whether it fits or not."""
    stage, memory = peak_memory(setting)
    capacity = allocatable_bytes(setting.cluster)
    return LayoutPlan(setting, stage, memory, step_time(setting), capacity)


def neighbour_settings(setting: Setting) -> Space:
    """Products of axes and micro-batches that are a factor of two away at most."""
    layout = setting.layout
    return Space(
        tensor=_around(layout.tensor),
        pipeline=_around(layout.pipeline),
        context=_around(layout.context),
        micro_batch=_around(setting.micro_batch),
    )


def _around(size: int) -> Collection[int]:
    return {size // 2, size, 2 * size}


def faster_changes(plan: LayoutPlan, *, on: str) -> list[FasterChange]:
    """Returns changes that would train more tokens per second, the greatest gain first.

    Each is a separate search, near the plan.

    Args:
        on: the value of ``--on`` that selects the cluster.
    """
    found = [*_changes(plan), *_more_devices(plan, on), *_bigger_micro_batch(plan)]
    worth = [help_ for help_ in found if help_.gain > WORTH]
    return sorted(worth, key=lambda help_: -help_.gain)


def _help(plan: LayoutPlan, better: LayoutPlan, change: str, words: str) -> FasterChange:
    before, after = plan.speed, better.speed
    each = after.tokens_per_s_per_gpu / before.tokens_per_s_per_gpu - 1
    return FasterChange(change, words, better, after.tokens_per_s / before.tokens_per_s - 1, each)


def _tried(
    plan: LayoutPlan, called: str, words: str, *, work: TrainingWork, cluster: Cluster, space: Space
) -> Iterator[FasterChange]:
    """Yields the best plan with a change, if one fits.

    Args:
        called, words: the change, and how to write it.
    """
    for best in search(work, cluster, software=plan.setting.software, space=space, kept=1).plans[:1]:
        yield _help(plan, best, called, words)


def _changes(plan: LayoutPlan) -> Iterator[FasterChange]:
    setting = plan.setting
    work, cluster, space = setting.work, setting.cluster, neighbour_settings(setting)
    if setting.layout.offload == "none":
        space = replace(space, offload={"none"})
    device = cluster.device
    if not device.is_cpu:
        roomy = replace(cluster, device=replace(device, memory_gib=2 * device.memory_gib))
        yield from _tried(plan, TWICE_MEMORY, "", work=work, cluster=roomy, space=space)
        if cluster.per_node > 1:
            faster = cluster.with_faster_links(2)
            called = f"twice the {device.link} inside a node"
            yield from _tried(plan, called, "", work=work, cluster=faster, space=space)
    if cluster.nodes > 1:
        faster = replace(cluster, network_gbs=2 * cluster.network_gbs)
        yield from _tried(plan, "twice the network", "", work=work, cluster=faster, space=space)
    batch = 2 * work.global_batch
    longer = work.resized(global_batch=batch)
    called = "twice the batch (longer accumulation)"
    yield from _tried(plan, called, f"train.batch={batch}", work=longer, cluster=cluster, space=space)


def _more_devices(plan: LayoutPlan, on: str) -> Iterator[FasterChange]:
    """Yields a fuller node, or one more node; if the batch is not divisible then, the next number that helps."""
    setting = plan.setting
    cluster = setting.cluster
    if cluster.device.is_cpu:
        return
    nodes = cluster.nodes
    counts = sorted({nodes + 1, *(nodes + nodes // part for part in (8, 4, 2, 1) if nodes >= part)})
    larger = [*fuller_nodes(cluster, like=on), *map(cluster.with_nodes, counts)]
    space = replace(neighbour_settings(setting), pipeline=None, micro_batch=None)
    for where in larger:
        more = where.nodes - nodes
        called = f"{more} node{'s' * (more > 1)} more" if more else f"{where.gpus} devices in the node"
        words = cluster_words(where, like=on, was=cluster)
        for found in _tried(plan, called, words, work=setting.work, cluster=where, space=space):
            if found.gain > WORTH:
                yield found
                return


def _bigger_micro_batch(plan: LayoutPlan) -> Iterator[FasterChange]:
    """Micro-batches of twice the rows in the same layout, where only memory prevents them."""
    setting = plan.setting
    size, layout = 2 * setting.micro_batch, setting.layout
    if setting.work.global_batch % (layout.data * size):
        return
    bigger = replace(setting, micro_batch=size)
    if layout.takes(bigger.micro_batches) and trainable(bigger):
        larger = plan_of(bigger)
        if not larger.fits:
            yield _help(plan, larger, f"a micro-batch of {size}, which needs more memory than there is", "")


def bottlenecks(plan: LayoutPlan, found: list[FasterChange]) -> list[Bottleneck]:
    """Resources that limit the plan's speed, the largest first; their seconds add up to the step, memory aside.

    Args:
        found: the result of `faster_changes` for the plan.
    """
    groups: dict[str, list[Cause]] = {}
    for name, cause in causes_of(plan.setting).items():
        groups.setdefault(_resource(name), []).append(cause)
    result = [
        Bottleneck(
            resource,
            sum(cause.seconds for cause in causes),
            tuple(sorted((cause for cause in causes if cause.seconds > 0), key=lambda cause: -cause.seconds)),
        )
        for resource, causes in groups.items()
    ]
    for help_ in found:
        if help_.change == TWICE_MEMORY:
            result.append(Bottleneck(MEMORY, plan.seconds - help_.plan.seconds, ()))
    return sorted((bind for bind in result if bind.seconds > 0), key=lambda bind: -bind.seconds)


def _resource(name: str) -> str:
    if name in RESOURCES:
        return RESOURCES[name]
    return name if name in ("optimizer", ROLLOUTS) else "compute"
