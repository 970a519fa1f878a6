"""``target: {slurm: ...}``: a cluster with Slurm."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from stoker.job.block import NaturalInt, PositiveInt, Text
from stoker.job.targets.shared_keys import TargetKeys


class SlurmBlock(TargetKeys):
    """A cluster with Slurm, asked here or on a login node."""

    login: Text | None = Field(
        default=None, description="login node that is reached by ssh; without it sbatch is called here",
        examples=["me@login.example.org"],
    )  # fmt: skip
    ssh: dict[str, str] = Field(
        default_factory=dict,
        description="options of ssh_config for the login node, such as {IdentityFile: ~/.ssh/cluster}",
        examples=[{"IdentityFile": "~/.ssh/cluster"}],
    )
    folder: Text = Field(
        default=".stoker",
        description="folder of what is sent, on storage that all nodes see: from here, or from the login node's home",
    )
    partition: Text | None = Field(default=None, description="partition, or several: gpu,long", examples=["gpu"])
    account: Text | None = Field(default=None, description="account that is charged", examples=["my-project"])
    qos: Text | None = Field(default=None, description="quality of service", examples=["normal"])
    reservation: Text | None = Field(default=None, description="reservation", examples=["course"])
    constraint: Text | None = Field(default=None, description="features that the nodes must have", examples=["a100"])
    time: Text | PositiveInt | None = Field(
        default=None, description='limit of the wall time: minutes, "hours:minutes:seconds" or days-hours',
        examples=["1-12:00:00"],
    )  # fmt: skip
    gres: Text = Field(
        default="gpu",
        description="what a node gives: gpu (one a process), gpu:h100 (likewise), gpu:8 as it stands, or none",
    )
    cpus: PositiveInt | None = Field(default=None, description="cores of each node", examples=[64])
    memory: Text | None = Field(default=None, description="memory of each node; 0: all of it", examples=["500G"])
    exclusive: bool = Field(default=False, description="whole nodes, shared with no other job")
    nodelist: Text | None = Field(default=None, description="nodes that must be among them", examples=["gpu[01-04]"])
    exclude: Text | None = Field(default=None, description="nodes that must not be among them", examples=["gpu07"])
    requeue: NaturalInt = Field(
        default=10, description="times that the job goes back into the queue: before its time ends, or preempted"
    )
    warn: PositiveInt = Field(
        default=180,
        description="seconds before the end of its time at which the run saves and is queued again",
    )
    container: Literal["none", "pyxis", "apptainer"] = Field(
        default="none",
        description="runs inside `image`: by pyxis (srun --container-image), or by apptainer",
    )
    image: Text | None = Field(
        default=None, description="the container's image: nvcr.io#nvidia/pytorch:25.10-py3, or a .sqsh or .sif file",
        examples=["stoker.sif"],
    )  # fmt: skip
    mounts: list[Text] = Field(
        default_factory=list,
        description="folders that the container sees: [/data, /scratch:/scratch]",
        examples=[["/data"]],
    )
    sbatch: list[Text] = Field(
        default_factory=list,
        description="further options of sbatch, such as [--mail-type=END]",
        examples=[["--mail-type=END"]],
    )

    @property
    def in_place(self) -> bool:
        """Returns whether the nodes share this machine's files: true if it is itself a login node."""
        return self.login is None
