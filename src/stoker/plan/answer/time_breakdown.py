"""Breakdown of a step's seconds by cause, down to the collectives of each axis.

The step is predicted with collectives that take no time, then also without recomputation, and so on; each difference
is the part of that cause. So the parts add up to the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from stoker.plan.setting import Setting
from stoker.plan.time.efficiency import efficiency_of
from stoker.plan.time.network_cost import CollectiveGroup
from stoker.plan.time.pass_times import PassTimes
from stoker.plan.time.step_time import step_time

FREE = 1e12  # times faster than it is: takes no time
ARITHMETIC, SMALL, TRAFFIC, LAUNCH = "arithmetic", "small matrix products", "memory traffic", "launch of kernels"
RECOMPUTE, UNEVEN, BUBBLE = "recomputation", "uneven stages", "bubble"
TENSOR, CONTEXT, EXPERT = "tensor-parallel collectives", "context-parallel collectives", "exchange of experts"
DATA, SENDS = "data-parallel collectives", "sends between stages"
PARTS = {"data parallel": DATA, "pipeline sends": SENDS}  # parts of a step time under other names


@dataclass(frozen=True)
class Cause:
    """A part of a step.

    Attributes:
        name: of the cause.
        seconds: of the step.
        link: the link of a collective; empty for other causes.
    """

    name: str
    seconds: float
    link: str = ""

    def __str__(self) -> str:
        return f"{self.name} over {self.link}" if self.link else self.name


def causes_of(setting: Setting) -> dict[str, Cause]:
    """Returns the parts of a step by name; they add up to its seconds."""
    parts = dict(step_time(setting).parts)
    compute = parts.pop("compute")
    found = {PARTS.get(name, name): seconds for name, seconds in parts.items()}
    efficiency = efficiency_of(setting.cluster.device)
    left = PassTimes(efficiency).with_equal_stages(setting)
    found[UNEVEN] = compute - left
    for name, now in _taken_away(setting):
        least = PassTimes(efficiency).with_equal_stages(now)
        found[name] = left - least
        left = least
    found[ARITHMETIC] = PassTimes(replace(efficiency, half_rows=0.0, half_width=0.0)).with_equal_stages(now)
    found[SMALL] = left - found[ARITHMETIC]
    links = _links(setting)
    return {name: Cause(name, seconds, links.get(name, "")) for name, seconds in found.items()}


def _taken_away(setting: Setting) -> Iterator[tuple[str, Setting]]:
    """Yields causes in the order of removal, each with the setting without it and those before.

    Collectives left without those of tensor parallelism are of another axis.
    """
    software = replace(setting.software, hidden_tensor=1.0)
    setting = replace(setting, software=software)
    yield TENSOR, setting
    cluster = setting.cluster.with_faster_links(FREE, latency=1 / FREE)
    cluster = replace(cluster, network_gbs=cluster.network_gbs * FREE, network_latency_s=0.0)
    setting = replace(setting, cluster=cluster)
    yield CONTEXT if setting.layout.context > 1 else EXPERT, setting
    software = replace(software, compiles="always" if setting.compiled else "never")
    layout = replace(setting.layout, recompute="none")
    setting = replace(setting, layout=layout, software=software)
    yield RECOMPUTE, setting
    software = replace(software, launch=0.0, launch_tensor=0.0, launch_across=(0.0, 0.0))
    setting = replace(setting, software=software)
    yield LAUNCH, setting
    device = replace(cluster.device, memory_gbs=cluster.device.memory_gbs * FREE)
    yield TRAFFIC, replace(setting, cluster=replace(cluster, device=device))


def _links(setting: Setting) -> dict[str, str]:
    """Returns the link that the collectives of each axis use: the node's if each of their groups is on one node."""
    layout, cluster = setting.layout, setting.cluster
    inside, across = layout.tensor * layout.context, layout.tensor * layout.context * layout.data
    groups = {
        TENSOR: CollectiveGroup(layout.tensor, 1),
        CONTEXT: CollectiveGroup(layout.context, layout.tensor),
        EXPERT: CollectiveGroup(setting.expert, layout.tensor if layout.tensor < setting.expert else 1),
        DATA: CollectiveGroup(layout.data, inside),
        SENDS: CollectiveGroup(layout.pipeline, across),
    }
    crossing = {name: group.size > group.inside(cluster.per_node) for name, group in groups.items()}
    return {name: "the network" if crosses else cluster.device.link for name, crosses in crossing.items()}
