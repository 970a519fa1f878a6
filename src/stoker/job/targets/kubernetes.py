"""``target: {kubernetes: ...}``: a cluster with Kubernetes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from stoker.job.block import Auto, NaturalInt, PositiveInt, Text
from stoker.job.targets.kubernetes_parts import (
    FluidBlock,
    Gang,
    Kind,
    LabelKey,
    LabelValue,
    Name,
    Path,
    Quantity,
    RdmaBlock,
    SecretKey,
    TolerationBlock,
    VolumeBlock,
)
from stoker.job.targets.shared_keys import TargetKeys, Variable


class KubernetesBlock(TargetKeys):
    """A cluster with Kubernetes: a pod for each node, with one supervisor in it."""

    kind: Kind = Field(
        default="job", description="kind of object to create: a Job, JobSet, Volcano Job, Kubeflow TrainJob, RayJob"
    )
    image: Text = Field(description="container image with Stoker, as built by the Dockerfile of its repository")
    image_pull: Literal["Always", "IfNotPresent", "Never"] | None = Field(
        default=None, description="image pull policy; by default that of Kubernetes", examples=["Always"]
    )
    image_pull_secrets: list[Name] = Field(
        default_factory=list, description="secrets with the registry's credentials", examples=[["registry"]]
    )
    namespace: Name | None = Field(
        default=None, description="namespace; by default that of the context", examples=["training"]
    )
    context: Text | None = Field(
        default=None, description="context of the kubeconfig; by default the current one", examples=["cluster"]
    )
    kubeconfig: Text | None = Field(
        default=None, description="kubeconfig file; by default KUBECONFIG or ~/.kube/config", examples=["cluster.yaml"]
    )
    gang: Gang | Auto = Field(
        default="auto",
        description="gang scheduler, which starts all pods or none; auto: volcano for a Volcano Job, else none",
    )
    queue: Text | None = Field(
        default=None, description="queue of volcano, kueue, koordinator or yunikorn", examples=["research"]
    )
    scheduler: Name | None = Field(
        default=None,
        description="name of the scheduler, if it is not the usual one of `gang`",
        examples=["volcano-2"],
    )
    priority: Name | None = Field(default=None, description="priority class", examples=["high"])
    workload_priority: Name | None = Field(
        default=None, description="Kueue's priority class in the queue", examples=["urgent"]
    )
    gpu: LabelKey | Literal["none"] = Field(
        default="nvidia.com/gpu",
        description="device resource, one for each process; nvidia.com/mig-3g.40gb and nvidia.com/gpu.shared are "
        "parts of a device; none: CPUs only",
    )
    device_class: Name | None = Field(
        default=None,
        description="device class for dynamic resource allocation of devices, instead of `gpu`",
        examples=["gpu.nvidia.com"],
    )
    resources: dict[LabelKey, NaturalInt | Quantity] = Field(
        default_factory=dict,
        description="additional resources of a pod, such as {volcano.sh/vgpu-memory: 8192}",
        examples=[{"volcano.sh/vgpu-memory": 8192}],
    )
    rdma: RdmaBlock | None = Field(default=None, description="RDMA cards, and NCCL's settings for them")
    alignment: Literal["none", "numa", "pcie"] = Field(
        default="none",
        description="numa: devices, cards and cores of one NUMA node (volcano, or the kubelets' policy); "
        "pcie: a device and its card of one PCIe root (koordinator, or device classes)",
    )
    interface: Text | None = Field(
        default=None, description="network interface of NCCL and gloo: eth0", examples=["eth0"]
    )
    cpu: PositiveInt | Quantity | None = Field(default=None, description="cores of a pod", examples=[32])
    memory: Quantity | None = Field(default=None, description="memory of a pod", examples=["256Gi"])
    shared_memory: Quantity | Literal["auto", "none"] = Field(
        default="auto",
        description="size of /dev/shm; auto: the pod's memory; none: 64 MiB, the default of the container runtime",
    )
    memlock: bool | Auto = Field(
        default="auto", description="allow locking of all memory (IPC_LOCK), which RDMA needs; auto: with rdma"
    )
    host_network: bool = Field(default=False, description="use the host's network in the pods")
    networks: list[Text] = Field(
        default_factory=list, description="additional networks of the pods, by Multus", examples=[["rdma-net"]]
    )
    one_per_host: bool | Auto = Field(
        default="auto", description="place at most one pod of the run on each host; auto: with host_network"
    )
    service_account: Name | None = Field(
        default=None, description="service account; by default that of the namespace", examples=["trainer"]
    )
    user: NaturalInt | None = Field(
        default=None, description="user of the processes; by default that of the image", examples=[1000]
    )
    group: NaturalInt | None = Field(default=None, description="group that owns the volumes (fsGroup)", examples=[1000])
    node_selector: dict[LabelKey, LabelValue] = Field(
        default_factory=dict, description="required labels of the nodes", examples=[{"gpu": "h100"}]
    )
    tolerations: list[TolerationBlock] = Field(
        default_factory=list, description="taints of nodes that the pods accept", examples=[[{"key": "gpu"}]]
    )
    topology: LabelKey | None = Field(
        default=None,
        description="node label whose value all pods must share: topology.kubernetes.io/zone, a rack, a block",
        examples=["topology.kubernetes.io/zone"],
    )
    topology_tier: NaturalInt | None = Field(
        default=None, description="highest tier of Volcano's hypernodes that the pods may span", examples=[1]
    )
    topology_mode: Literal["required", "preferred"] = Field(
        default="preferred", description="whether pods that do not fit there wait, or run elsewhere"
    )
    volumes: list[VolumeBlock] = Field(
        default_factory=list, description="volumes of the pods", examples=[[{"claim": "runs", "at": "/work"}]]
    )
    folder: Path = Field(
        default="/work", description="folder that relative paths of runs start from, on a volume shared by all pods"
    )
    secrets: dict[Variable, SecretKey] = Field(
        default_factory=dict,
        description="environment variables from secrets of the namespace, as VARIABLE: SECRET/KEY",
        examples=[{"HF_TOKEN": "hub/token"}],
    )
    time_limit: PositiveInt | None = Field(
        default=None, description="seconds after which the cluster stops the run", examples=[86400]
    )
    retries: NaturalInt = Field(
        default=3,
        description="number of restarts of a pod; none after exit code 2 or 3; evictions count only on Volcano",
    )
    ttl: NaturalInt | None = Field(
        default=None, description="seconds after which the objects of a finished run are deleted", examples=[604800]
    )
    labels: dict[LabelKey, LabelValue] = Field(
        default_factory=dict, description="additional labels of the created objects", examples=[{"team": "speech"}]
    )
    annotations: dict[LabelKey, str] = Field(
        default_factory=dict, description="additional annotations of the pods", examples=[{"example.com/owner": "me"}]
    )
    mpi: bool = Field(default=False, description="provide a host file for MPI; in a Volcano Job, also SSH keys")
    ssh_secret: Name | None = Field(
        default=None, description="secret with SSH keys, mounted at /root/.ssh, for MPI", examples=["mpi-keys"]
    )
    fluid: FluidBlock | None = Field(default=None, description="a Fluid dataset")
    ray_version: Text | None = Field(
        default=None, description="version of Ray in the image of a RayJob", examples=["2.52.0"]
    )
    forward: list[Text] = Field(
        default_factory=list,
        description="environment variables of this shell to forward, by name or pattern; none whose value is a secret",
        examples=[["NCCL_*"]],
    )
    code: bool = Field(
        default=False, description="send the code of this Stoker; false: Stoker is installed in the image"
    )

    @property
    def instead_of_private(self) -> str:
        """Files are sent in config maps, which whoever may read the namespace's objects can read."""
        return "put it on a volume with mode 600, and write its absolute path there, such as /work/run.secret"


def gang_of(block: KubernetesBlock) -> Gang:
    """Returns the gang scheduler of the pods."""
    if block.gang != "auto":
        return block.gang
    return "volcano" if block.kind == "volcano" else "none"
