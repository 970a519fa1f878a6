"""Parts of ``target: {kubernetes: ...}``: names and quantities as Kubernetes accepts them, volumes, GPUs, data sets."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stoker.job.block import Auto, Block, NaturalInt, PositiveInt, Text
from stoker.job.keys.text_forms import of_form

QUANTITY = r"[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?"  # of Kubernetes: 500m, 64, 128Gi
SECRET_KEY = r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[-._a-zA-Z0-9]+"  # of a secret: NAME/KEY
LABEL = r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"
DNS_NAME = r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?"

Quantity = Annotated[str, of_form(f"^{QUANTITY}$", "an amount such as 500m, 1.5 or 64Gi")]
Name = Annotated[str, of_form(f"^{DNS_NAME}$", "a name of lower-case letters, digits, `-` and `.`", most=253)]
LabelKey = Annotated[str, of_form(f"^{LABEL}$", "a name such as example.com/gpu", most=317)]
LabelValue = Annotated[
    str,
    of_form(
        r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$",
        "at most 63 letters, digits, `-`, `_` and `.`, with a letter or digit at both ends",
        most=63,
    ),
]
SecretKey = Annotated[str, of_form(f"^{SECRET_KEY}$", "the name of a secret and of a key in it, such as hub/token")]
Path = Annotated[str, of_form(r"^/[^:]*$", "an absolute path without a colon")]

Kind = Literal["job", "jobset", "volcano", "trainjob", "rayjob"]
Gang = Literal["none", "volcano", "kueue", "coscheduling", "koordinator", "yunikorn", "native"]


class TolerationBlock(Block):
    """A taint of nodes that the pods accept."""

    key: LabelKey | None = Field(default=None, description="key of the taint; without it, every key", examples=["gpu"])
    value: LabelValue | None = Field(
        default=None, description="value of the taint; without it, every value", examples=["h100"]
    )
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        default=None, description="effect of the taint; without it, every effect", examples=["NoSchedule"]
    )
    seconds: NaturalInt | None = Field(
        default=None, description="seconds that a pod stays after NoExecute is set; without it, always", examples=[60]
    )


class VolumeBlock(Block):
    """A volume of the pods: exactly one of claim, host_path, config_map, secret, nfs and empty."""

    at: Path = Field(description="mount path in the containers, such as /data", examples=["/data"])
    claim: Name | None = Field(default=None, description="name of a persistent volume claim", examples=["datasets"])
    host_path: Path | None = Field(default=None, description="folder on the host", examples=["/mnt/nvme"])
    config_map: Name | None = Field(default=None, description="name of a config map", examples=["settings"])
    secret: Name | None = Field(
        default=None, description="name of a secret, whose keys become files", examples=["certificates"]
    )
    nfs: Annotated[str, of_form(r"^[^:]+:/.*$", "an export such as nfs.example.org:/runs")] | None = Field(
        default=None, description="NFS export as SERVER:/FOLDER", examples=["nfs.example.org:/runs"]
    )
    empty: Quantity | Literal["unlimited"] | None = Field(
        default=None, description="empty folder of this size on the node, deleted with the pod", examples=["500Gi"]
    )
    sub_path: Text | None = Field(
        default=None, description="mount only this folder of the volume", examples=["team/runs"]
    )
    read_only: bool = Field(default=False, description="mount the volume read-only")


class RdmaBlock(Block):
    """RDMA cards, and NCCL's settings for them."""

    resource: LabelKey = Field(
        default="rdma/hca_shared_devices_a",
        description="resource of the device plugin; nvidia.com/hostdev and koordinator.sh/rdma are others",
    )
    count: PositiveInt = Field(default=1, description="number of the resource for each pod")
    network: Literal["infiniband", "roce"] = Field(default="infiniband", description="network type of the cards")
    hca: Text | None = Field(
        default=None, description="cards that NCCL uses (NCCL_IB_HCA): mlx5, or =mlx5_0:1", examples=["mlx5"]
    )
    gid_index: NaturalInt | Auto = Field(
        default="auto", description="NCCL_IB_GID_INDEX; auto: 3 with roce (RoCE v2, as a rule), unset with infiniband"
    )
    traffic_class: Annotated[int, Field(ge=0, le=255)] | None = Field(
        default=None, description="NCCL_IB_TC, of lossless RoCE networks", examples=[106]
    )
    service_level: Annotated[int, Field(ge=0, le=15)] | None = Field(
        default=None, description="NCCL_IB_SL of InfiniBand", examples=[0]
    )
    device_class: Name | None = Field(
        default=None,
        description="device class for dynamic resource allocation of cards, instead of `resource`",
        examples=["rdma.example.com"],
    )


class FluidMountBlock(Block):
    """A place that a Fluid dataset reads from."""

    url: Text = Field(
        description="URL of the storage, such as s3://bucket/folder, oss://..., https://... or pvc://claim"
    )
    name: Name = Field(default="data", description="name of the folder in the dataset")
    options: dict[str, str] = Field(
        default_factory=dict, description="options of the storage, such as alluxio.underfs.s3.endpoint: URL",
        examples=[{"alluxio.underfs.s3.region": "eu-west-1"}],
    )  # fmt: skip
    secrets: dict[str, SecretKey] = Field(
        default_factory=dict, description="options from secrets, as OPTION: SECRET/KEY",
        examples=[{"aws.accessKeyId": "s3-keys/id"}],
    )  # fmt: skip


class FluidBlock(Block):
    """A Fluid dataset: data of a remote store, cached on the cluster's nodes and mounted into the pods."""

    mounts: Annotated[list[FluidMountBlock], Field(min_length=1)] = Field(
        description="storage that the dataset reads from"
    )
    at: Path = Field(default="/data", description="mount path in the containers")
    runtime: Literal["alluxio", "juicefs"] = Field(default="alluxio", description="runtime of the cache")
    replicas: PositiveInt | Auto = Field(
        default="auto", description="number of nodes that cache; auto: the number of nodes of the run"
    )
    medium: Literal["MEM", "SSD", "HDD"] = Field(default="MEM", description="storage medium of the cache")
    path: Path = Field(default="/dev/shm", description="folder of the cache on the nodes")
    quota: Quantity = Field(default="8Gi", description="size of the cache on each node")
    preload: bool = Field(default=True, description="load all data into the cache when the run is submitted")
    read_only: bool = Field(default=True, description="mount the dataset read-only")
