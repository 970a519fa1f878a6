"""Resources that a pod requests from its node: cores, memory, devices, cards."""

from __future__ import annotations

from stoker.cluster.kubernetes.cluster_run import ClusterRun
from stoker.cluster.kubernetes.manifest_fields import Manifest


def resource_amounts(run: ClusterRun) -> dict[str, int | str]:
    """Returns the resources of a pod by name, without those that are claimed by device class."""
    block = run.block
    found: dict[str, int | str] = {}
    if block.cpu is not None:
        found["cpu"] = block.cpu
    if block.memory is not None:
        found["memory"] = block.memory
    if block.gpu != "none" and block.device_class is None:
        found[block.gpu] = run.devices
    if block.rdma is not None and block.rdma.device_class is None:
        found[block.rdma.resource] = block.rdma.count
    return found | block.resources


def pod_resources(run: ClusterRun) -> Manifest:
    """Returns the ``resources`` of the container.

    Requests equal limits. A pod that names cores and memory is then of class Guaranteed; kubelets pin no other's cores.
    """
    found = resource_amounts(run)
    return {"requests": dict(found), "limits": dict(found)} if found else {}
