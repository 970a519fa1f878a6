"""Placement of pods: node labels, taints, topology, one pod per host, devices close to their cards."""

from __future__ import annotations

import json

from stoker.cluster.kubernetes.cluster_run import ClusterRun
from stoker.cluster.kubernetes.manifest_fields import INSTANCE, Manifest, without_empty
from stoker.job.targets.kubernetes import KubernetesBlock
from stoker.job.targets.kubernetes_parts import TolerationBlock

HOST = "kubernetes.io/hostname"
# Koordinator: apis/extension/device_share.go. Both kinds of device come from one PCIe switch.
KOORDINATOR_JOINT = "scheduling.koordinator.sh/device-joint-allocate"
# Volcano: pkg/apis/scheduling/v1beta1/labels.go
VOLCANO_NUMA = "volcano.sh/numa-topology-policy"
MULTUS = "k8s.v1.cni.cncf.io/networks"


def pod_affinity(run: ClusterRun) -> Manifest:
    """Returns the ``affinity`` of a pod: in one topology domain with the run's other pods, but on separate hosts, if
    set.

    Kueue and the native pod groups place by topology themselves: see `stoker.cluster.kubernetes.gangs`.
    """
    block = run.block
    together = apart = None
    if block.topology is not None and run.gang not in ("kueue", "native"):
        term = _term(run, block.topology)
        if block.topology_mode == "required":
            together = {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
        else:
            weighted = {"weight": 100, "podAffinityTerm": term}
            together = {"preferredDuringSchedulingIgnoredDuringExecution": [weighted]}
    if one_per_host(block):
        apart = {"requiredDuringSchedulingIgnoredDuringExecution": [_term(run, HOST)]}
    return without_empty(podAffinity=together, podAntiAffinity=apart)


def one_per_host(block: KubernetesBlock) -> bool:
    """Returns whether no two pods of a run may share a host; on the host's network they would share its ports."""
    return block.host_network if block.one_per_host == "auto" else block.one_per_host


def pod_tolerations(tolerations: list[TolerationBlock]) -> list[Manifest]:
    """Returns the ``tolerations`` of a pod."""
    return [
        without_empty(
            key=each.key,
            operator="Exists" if each.value is None else "Equal",
            value=each.value,
            effect=each.effect,
            tolerationSeconds=each.seconds,
        )
        for each in tolerations
    ]


def placement_annotations(run: ClusterRun) -> dict[str, str]:
    """Annotations of a pod that a scheduler or the network plugin reads."""
    block = run.block
    found = {}
    if block.networks:
        found[MULTUS] = ", ".join(block.networks)
    if block.alignment == "numa" and run.gang == "volcano":
        found[VOLCANO_NUMA] = "single-numa-node"
    if block.alignment == "pcie" and run.gang == "koordinator":
        joint = {"deviceTypes": ["gpu", "rdma"], "requiredScope": "SamePCIe"}
        found[KOORDINATOR_JOINT] = json.dumps(joint)
    return found


def _term(run: ClusterRun, key: str) -> Manifest:
    return {"labelSelector": {"matchLabels": {INSTANCE: run.name}}, "topologyKey": key}
