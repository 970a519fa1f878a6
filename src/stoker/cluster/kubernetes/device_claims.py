"""Devices and network cards by dynamic resource allocation: the claim template, and a pod's reference to it.

API: resource.k8s.io/v1, in Kubernetes since 1.34. The attribute of the PCIe root is the one that Kubernetes defines for
all drivers (KEP 4381, "standard device attributes").
"""

from __future__ import annotations

from stoker.cluster.kubernetes.cluster_run import ClusterRun
from stoker.cluster.kubernetes.manifest_fields import Manifest, manifest, without_empty

PCIE_ROOT = "resource.kubernetes.io/pcieRoot"
CLAIM = "devices"


def claim_name(run: ClusterRun) -> str:
    """Returns the name of the claim template."""
    return f"{run.name}-devices"


def claims(run: ClusterRun) -> bool:
    """Returns whether the pods have a claim."""
    return bool(_classes(run))


def claim_template(run: ClusterRun) -> Manifest:
    """Returns the claim of each pod: devices and cards, each device with a card of its PCIe root if alignment is on."""
    classes = _classes(run)
    if run.block.alignment == "pcie" and len(classes) == 2:
        pairs = [(f"device-{index}", f"card-{index}") for index in range(run.devices)]
        requests = [
            _request(name, cls) for pair in pairs for name, (cls, _) in zip(pair, classes.values(), strict=True)
        ]
        constraints = [{"requests": list(pair), "matchAttribute": PCIE_ROOT} for pair in pairs]
    else:
        requests = [_request(name, cls, count) for name, (cls, count) in classes.items()]
        constraints = []
    spec = {"spec": {"devices": without_empty(requests=requests, constraints=constraints)}}
    return manifest(run, "resource.k8s.io/v1", "ResourceClaimTemplate", name=claim_name(run), spec=spec)


def pod_claims(run: ClusterRun) -> list[Manifest]:
    """Returns the ``resourceClaims`` of a pod."""
    return [{"name": CLAIM, "resourceClaimTemplateName": claim_name(run)}] if claims(run) else []


def _classes(run: ClusterRun) -> dict[str, tuple[str, int]]:
    """Returns the claimed classes: name of the request to (device class, count)."""
    found: dict[str, tuple[str, int]] = {}
    if run.block.device_class is not None:
        found["devices"] = (run.block.device_class, run.devices)
    rdma = run.block.rdma
    if rdma is not None and rdma.device_class is not None:
        found["cards"] = (rdma.device_class, rdma.count)
    return found


def _request(name: str, device_class: str, count: int = 1) -> Manifest:
    return {"name": name, "exactly": without_empty(deviceClassName=device_class, count=count if count > 1 else None)}
