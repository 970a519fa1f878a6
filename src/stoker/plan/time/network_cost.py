"""Seconds of collectives and sends over the links of a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import Literal

from numpy import interp

from stoker.hardware.machines.cluster import Cluster
from stoker.hardware.measured.calibration import Curve
from stoker.plan.time.efficiency import Efficiency

Kind = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all"]

# Share of a node's network rate that collectives reach on AWS' fabric, which congests as nodes are added: nodes,
# all-reduce, its halves by themselves, all of 400 GB/s a node. Measured on H100s (Hugging Face, 2025, The Ultra-Scale
# Playbook, benchmarks of collectives).
EFA = (
    (2, 0.905, 0.462), (4, 0.40, 0.298), (8, 0.25, 0.172), (16, 0.212, 0.138), (32, 0.162, 0.07), (64, 0.082, 0.028),
)  # fmt: skip
# Minimum seconds of each step of a gather's or scatter's ring there: 0.5 ms for 16 processes on two nodes, 1.4
# for 32 on four, derived from the playbook's runs with tensor parallelism across nodes, whatever the message's size.
EFA_STEP = 4e-5


@dataclass(frozen=True)
class CollectiveGroup:
    """Processes of a collective, and their placement on the nodes.

    Attributes:
        size: processes.
        stride: the distance of two neighbours in the numbering of all processes.
    """

    size: int
    stride: int

    def inside(self, per_node: int) -> int:
        """Members on one node."""
        return min(self.size, max(1, per_node // self.stride))


def wire_bytes(kind: Kind, size: int, processes: int) -> float:
    """Bytes that each process sends when a collective over tensors of ``size`` bytes runs as a ring.

    An all-reduce is a reduce-scatter and an all-gather (Patarasuk and Yuan, 2009), which is why DDP and ZeRO-2
    move the same (Rajbhandari et al., 2020, section 7).
    """
    return (2 if kind == "all-reduce" else 1) * ((processes - 1) / processes) * size


def collective_seconds(
    kind: Kind, size: float, group: CollectiveGroup, cluster: Cluster, efficiency: Efficiency, *, calls: int = 1
) -> float:
    """Seconds of collectives over tensors of ``size`` bytes in all, as rings (Patarasuk and Yuan, 2009).

    Inside a node they are those of the calibration, if it has any. Groups that differ only in their first member talk
    at the same time and share the nodes' network. In a ring through several nodes each node sends the ring's bytes
    once, however many of its devices the ring passes.

    Args:
        calls: in how many collectives the bytes go.
    """
    if group.size == 1 or not size:
        return 0.0
    members = group.inside(cluster.per_node)
    if group.size <= members and (curve := _measured(kind, group.size, cluster)) is not None:
        return calls * measured_seconds(curve, size / calls, group.size)
    sent = wire_bytes(kind, int(size), group.size)
    rounds = (2 if kind == "all-reduce" else 1) * (group.size - 1)
    seconds = sent / (cluster.device.link_gbs * 1e9 * efficiency.link)
    latency = (rounds + efficiency.start) * cluster.link_latency_s
    if group.size > members:
        rings = cluster.per_node / members
        share = network_share(cluster, group.size / members, efficiency, whole=kind == "all-reduce")
        seconds = max(seconds, sent * rings / (cluster.network_gbs * 1e9 * share))
        nodes = group.size / members
        latency = (2 if kind == "all-reduce" else 1) * nodes * cluster.network_latency_s
        latency += efficiency.start * cluster.link_latency_s
        if kind != "all-reduce":  # trees take that by its logarithm, its halves go round by every process
            latency += (group.size - nodes) * cluster.link_latency_s
            if cluster.fabric == "EFA":
                latency = max(latency, rounds * EFA_STEP)
    return seconds + calls * latency


def measured_seconds(curve: Curve, size: float, processes: int) -> float:
    """Returns the seconds of a collective between another number of processes than was measured.

    It has the time at which each process sends as many bytes, with the latency of its own number of ring steps.
    """
    steps = (processes - 1) / (curve.ranks - 1)
    same_sent = size * steps * curve.ranks / processes
    return steps * curve.latency + max(0.0, curve.time(same_sent) - curve.latency)


def send_seconds(size: float, *, stride: int, cluster: Cluster, efficiency: Efficiency) -> float:
    """Returns seconds to send a message ``stride`` ranks ahead, while all of a node's processes send."""
    if stride < cluster.per_node and cluster.gpus <= cluster.per_node:
        if (curve := _measured("send", cluster.per_node, cluster)) is not None:
            return curve.time(size)
        return size / (cluster.device.link_gbs * 1e9 * efficiency.link) + cluster.link_latency_s
    crossing = min(stride, cluster.per_node)
    rate = cluster.network_gbs * 1e9 * network_share(cluster, 2, efficiency)
    return size * crossing / rate + cluster.network_latency_s


def network_share(cluster: Cluster, nodes: float, efficiency: Efficiency, *, whole: bool = True) -> float:
    """Returns the fraction of the network's rate that a collective over this number of nodes reaches.

    Args:
        whole: whether it is an all-reduce, not only a half of one.
    """
    if cluster.fabric != "EFA":
        return efficiency.network
    steps = [log(step[0]) for step in EFA]
    return float(interp(log(max(nodes, 1)), steps, [step[1 if whole else 2] for step in EFA]))


def _measured(kind: Kind | Literal["send"], processes: int, cluster: Cluster) -> Curve | None:
    """Returns the calibration's times of a collective inside a node; None if it has none."""
    return cluster.calibration.collective(kind, processes) if cluster.calibration is not None else None
