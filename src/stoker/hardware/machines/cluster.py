"""A cluster: its devices, their number and links, cost and failures."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from stoker.errors import Problem, UserError
from stoker.hardware.machines.device_catalogue import DeviceKind
from stoker.hardware.machines.network import Network, parse_network
from stoker.hardware.machines.nodes import NodeType, reference_node
from stoker.hardware.measured.calibration import Calibration
from stoker.hardware.measured.planner_correction import Correction

# Seconds of one step of a ring, by its link: NCCL's own model, src/graph/tuning.cc, protocol Simple.
NVLINK_LATENCY, PCIE_LATENCY, NETWORK_LATENCY = 3.4e-6, 5.7e-6, 14e-6
# Unexpected interruptions per GPU and hour: 419 in 54 days on 16,384 H100 (Llama 3, section 3.3.4).
FAILURES_PER_GPU_HOUR = 419 / (54 * 24 * 16384)
# Seconds from an interruption to training: "within 15 minutes" (MegaScale, section 6.3); the work lost since the last
# checkpoint is added to it.
RECOVERY = 900.0
# GB/s that a node writes to storage that all nodes share: 2 TB/s for 24,000 GPUs in nodes of eight is 0.67 (Llama 3,
# section 3.3.1).
STORAGE_GBS = 1.0
HOURS_PER_MONTH = 730.0


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal devices. A node is a domain of the fast link: eight GPUs, or the 72 of an NVL72 rack.

    Attributes:
        per_node: devices of a node.
        network_gbs: GB/s of a node to the others, one way, all rails together.
        rails: ports that share it.
        fabric: kind of the network if that matters: ``EFA``.
        network_latency_s, link_latency_s: seconds of one step of a ring across nodes and inside of one.
        host_memory_gib: GiB of a node's host.
        host_cores: its cores.
        price_per_hour: of a node; None if unknown.
        failures_per_gpu_hour: interruptions of the run per device and hour.
        recovery_s: seconds from an interruption until training continues from the checkpoint.
        storage_gbs: GB/s that each node writes checkpoints with, all of them at once.
        name: as it was requested.
        calibration: measurements of its devices; None without.
        corrections: of predictions for its devices, learnt from finished runs.
        notes: assumptions, in sentences for the user.
    """

    device: DeviceKind
    per_node: int
    nodes: int
    network_gbs: float
    rails: int
    network_latency_s: float
    link_latency_s: float
    host_memory_gib: float
    host_cores: int
    price_per_hour: float | None = None
    currency: str = "USD"
    failures_per_gpu_hour: float = FAILURES_PER_GPU_HOUR
    recovery_s: float = RECOVERY
    storage_gbs: float = STORAGE_GBS
    name: str = ""
    fabric: str = ""
    calibration: Calibration | None = field(default=None, repr=False)
    corrections: tuple[Correction, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def gpus(self) -> int:
        """Devices in all."""
        return self.nodes * self.per_node

    @property
    def host_memory_gib_per_gpu(self) -> float:
        """GiB of the host for each device."""
        return self.host_memory_gib / self.per_node

    @property
    def total_price_per_hour(self) -> float | None:
        """The price of all nodes; None if unknown."""
        return None if self.price_per_hour is None else self.price_per_hour * self.nodes

    @property
    def monthly_availability(self) -> float:
        """Chance that one device goes through a month (730 hours) without an interruption."""
        return math.exp(-self.failures_per_gpu_hour * HOURS_PER_MONTH)

    def correction(self, precision: str, tuning: str) -> Correction | None:
        """Returns the correction of predictions for such runs; None if there is none."""
        alike = (found for found in self.corrections if (found.precision, found.tuning) == (precision, tuning))
        return next(alike, None)

    @property
    def measured_links(self) -> str:
        """Describes the measured collectives that plans use inside a node; empty if there are none."""
        found = self.calibration
        if found is None or self.per_node == 1 or not found.measured_ranks:
            return ""
        ranks = " and ".join(map(str, found.measured_ranks))
        return f"collectives inside a node are those measured between {ranks} processes on {found.date}"

    def with_faster_links(self, factor: float, *, latency: float = 1.0) -> Cluster:
        """Returns the cluster with ``factor`` times the bandwidth inside a node, and a fraction of the latency."""
        found = self.calibration
        return replace(
            self,
            device=replace(self.device, link_gbs=factor * self.device.link_gbs),
            link_latency_s=latency * self.link_latency_s,
            calibration=found and found.with_faster_links(factor, latency=latency),
        )

    def with_nodes(self, nodes: int) -> Cluster:
        """This cluster with another number of nodes."""
        return replace(self, nodes=nodes)

    def _with_per_node(self, per_node: int) -> Cluster:
        """Returns the cluster with a part of each node: devices keep their fraction of the network and of the host."""
        part = per_node / self.per_node
        return replace(
            self,
            per_node=per_node,
            network_gbs=self.network_gbs * part,
            rails=max(1, round(self.rails * part)),
            host_memory_gib=self.host_memory_gib * part,
            host_cores=max(1, round(self.host_cores * part)),
            price_per_hour=None if self.price_per_hour is None else self.price_per_hour * part,
        )


def failures_of(monthly_availability: float) -> float:
    """Returns failures per hour of a device with this chance to survive a month: exp(-rate x 730 h)."""
    return -math.log(monthly_availability) / HOURS_PER_MONTH


def cluster_of(
    device: DeviceKind,
    *,
    gpus: int | None = None,
    per_node: int | None = None,
    nodes: int | None = None,
    network: str | Network | None = None,
    like: NodeType | None = None,
) -> Cluster:
    """Returns a cluster of a device; missing values are taken from its reference node.

    Args:
        gpus: total number of devices, instead of ``nodes``: the fewest equal nodes, none more than half empty.
        per_node: by default the node's; network and host are scaled with it.
        network: a description, or the network itself.
        like: the type of node, by default `reference_node`.

    Raises:
        UserError: the devices do not fill equal nodes, or the network's description has no rate.
    """
    node = like or reference_node(device)
    if gpus is not None:
        nodes, per_node = _equal_nodes(gpus, per_node or node.per_node)
    published = parse_network(node.network)
    assert published is not None
    cluster = Cluster(
        device=device,
        per_node=node.per_node,
        nodes=nodes or 1,
        network_gbs=published.gbs,
        rails=published.rails,
        network_latency_s=NETWORK_LATENCY,
        link_latency_s=PCIE_LATENCY if device.link == "PCIe" else NVLINK_LATENCY,
        host_memory_gib=node.host_memory_gib,
        host_cores=node.host_cores,
        name=node.name,
        fabric=published.fabric,
    )
    if device.like:
        found = f"{device.name}: {device.memory_gib:g} GiB, {device.memory_gbs:g} GB/s, {device.power:.0%} of the power"
        cluster = replace(cluster, notes=(f"{found}; all else as {device.like}",))
    if per_node is not None and per_node != node.per_node:
        cluster = cluster._with_per_node(per_node)
    if isinstance(network, str):
        parsed = parse_network(network, device, per_node=cluster.per_node)
        if parsed is None:
            raise UserError(Problem(f"`{network}` names no rate", "write it as `8 x 400 Gb/s` or `25 GB/s`"))
        network = parsed
    if network is not None:
        return replace(cluster, network_gbs=network.gbs, rails=network.rails, fabric=network.fabric)
    if cluster.nodes > 1 and like is None:
        gbs = f"{cluster.network_gbs:g} GB/s"
        cluster = replace(
            cluster, notes=(*cluster.notes, f"network as in {node.name} ({node.source}): {gbs} a node, one way")
        )
    return cluster


def _equal_nodes(gpus: int, largest: int) -> tuple[int, int]:
    """(nodes, devices of each): 128 in racks of 72 are two of 64."""
    if gpus <= largest:
        return 1, gpus
    for each in range(largest, (largest - 1) // 2, -1):
        if gpus % each == 0:
            return gpus // each, each
    full = gpus // largest * largest
    message = f"{gpus} devices cannot be divided into equal nodes of up to {largest}"
    raise UserError(Problem(message, f"write {full} or {full + largest}"))
