"""``target: {ray: ...}``: an existing Ray cluster."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from stoker.job.block import Auto, Text
from stoker.job.targets.shared_keys import TargetKeys


class RayBlock(TargetKeys):
    """An existing Ray cluster: one supervisor on each node of a placement group."""

    address: Text = Field(
        default="http://127.0.0.1:8265",
        description="address of Ray's dashboard, which accepts jobs; RAY_API_SERVER_ADDRESS comes before the default",
    )
    gpus: bool | Auto = Field(
        default="auto", description="request a GPU from Ray for each process; auto: if the cluster has any"
    )
    cpus: Annotated[float, Field(gt=0)] = Field(default=1.0, description="CPUs to request from Ray for each process")
    resources: dict[str, float] = Field(
        default_factory=dict, description="additional resources of a node, such as {rdma: 1}", examples=[{"rdma": 1.0}]
    )
    folder: Text = Field(
        default="~/stoker", description="folder on the nodes, shared by all, that relative paths of runs start from"
    )
    wait: Annotated[float, Field(gt=0)] = Field(
        default=3600.0, description="seconds to wait until all nodes are free at once"
    )

    @property
    def instead_of_private(self) -> str:
        """Ray keeps what is sent with a job where all jobs can read it."""
        return "put it on every node with mode 600, and write its absolute path there"
