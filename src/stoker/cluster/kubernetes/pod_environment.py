"""Environment variables of the containers: the pod's name and address, NCCL's settings, the user's, and secrets."""

from __future__ import annotations

from stoker.cluster.kubernetes.cluster_run import ClusterRun
from stoker.cluster.kubernetes.manifest_fields import Manifest, literal
from stoker.cluster.kubernetes.node_script import GIVEN, HOSTFILE, WORK
from stoker.cluster.sent_files import CODE
from stoker.job.targets.kubernetes import KubernetesBlock

FROM_POD = {"POD_NAME": "metadata.name", "POD_IP": "status.podIP"}
ROCE_V2 = 3  # the usual index of a card's RoCE v2 address over IPv4
# Where Open MPI 4 and 5, Intel MPI and MPICH look for hosts.
HOSTFILE_OF_MPI = (
    "OMPI_MCA_orte_default_hostfile", "PRTE_MCA_prte_default_hostfile", "I_MPI_HYDRA_HOST_FILE", "HYDRA_HOST_FILE"
)  # fmt: skip


def pod_environment(run: ClusterRun) -> list[Manifest]:
    """Returns the ``env`` of a container. Variables of the user are never overridden."""
    found: dict[str, Manifest] = {}
    for name, field in FROM_POD.items():
        found[name] = {"valueFrom": {"fieldRef": {"fieldPath": field}}}
    code = {"PYTHONPATH": f"{WORK}/{CODE}"} if run.code and run.kind == "rayjob" else {}  # else the script sets it
    mpi = dict.fromkeys(HOSTFILE_OF_MPI, f"{GIVEN}/{HOSTFILE}") if run.block.mpi else {}
    plain = {**code, **network_environment(run.block), **mpi, **run.environment}
    found |= {name: {"value": literal(value)} for name, value in plain.items()}
    for name, reference in run.block.secrets.items():
        secret, _, key = reference.partition("/")
        found[name] = {"valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
    return [{"name": name, **source} for name, source in found.items()]


def network_environment(block: KubernetesBlock) -> dict[str, str]:
    """Variables of NCCL and gloo for the network that the block describes.

    Names and meaning: NVIDIA, NCCL documentation, "Environment Variables".
    """
    found: dict[str, str] = {}
    if block.interface is not None:
        found |= {"NCCL_SOCKET_IFNAME": block.interface, "GLOO_SOCKET_IFNAME": block.interface}
    rdma = block.rdma
    if rdma is None:
        return found
    index = rdma.gid_index if rdma.gid_index != "auto" else ROCE_V2 if rdma.network == "roce" else None
    settings = {
        "NCCL_IB_HCA": rdma.hca,
        "NCCL_IB_GID_INDEX": index,
        "NCCL_IB_TC": rdma.traffic_class,
        "NCCL_IB_SL": rdma.service_level,
    }
    return found | {name: f"{value}" for name, value in settings.items() if value is not None}
