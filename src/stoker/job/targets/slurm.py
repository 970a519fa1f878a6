"""``target: {slurm: ...}``: a cluster with Slurm."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from stoker.job.block import NaturalInt, PositiveInt, Text
from stoker.job.targets.shared_keys import SpareKeys


class SlurmBlock(SpareKeys):
    """A cluster with Slurm, asked here or on a login node."""

    login: Text | None = Field(
        default=None, description="login node, reached over ssh; without it, sbatch runs on this machine",
        examples=["me@login.example.org"],
    )  # fmt: skip
    ssh: dict[str, str] = Field(
        default_factory=dict,
        description="options of ssh_config for the login node, such as {IdentityFile: ~/.ssh/cluster}",
        examples=[{"IdentityFile": "~/.ssh/cluster"}],
    )
    folder: Text = Field(
        default=".stoker",
        description="folder for the files that are sent, on storage shared by all nodes; relative to the "
        "current folder, or with `login` to the home on the login node",
    )
    partition: Text | None = Field(default=None, description="partition, or several: gpu,long", examples=["gpu"])
    account: Text | None = Field(default=None, description="account to charge", examples=["my-project"])
    qos: Text | None = Field(default=None, description="quality of service", examples=["normal"])
    reservation: Text | None = Field(default=None, description="reservation", examples=["course"])
    constraint: Text | None = Field(default=None, description="required features of the nodes", examples=["a100"])
    time: Text | PositiveInt | None = Field(
        default=None, description="wall time limit: minutes, \"hours:minutes:seconds\" or days-hours",
        examples=["1-12:00:00"],
    )  # fmt: skip
    gres: Text = Field(
        default="gpu",
        description="generic resources of a node: gpu or gpu:h100 (one per process), gpu:8 (used as it is), or none",
    )
    cpus: PositiveInt | None = Field(default=None, description="cores of each node", examples=[64])
    memory: Text | None = Field(default=None, description="memory of each node; 0: all of it", examples=["500G"])
    exclusive: bool = Field(default=False, description="allocate whole nodes, not shared with other jobs")
    nodelist: Text | None = Field(default=None, description="nodes that must be included", examples=["gpu[01-04]"])
    exclude: Text | None = Field(default=None, description="nodes that must not be used", examples=["gpu07"])
    requeue: NaturalInt = Field(
        default=10, description="number of times that the job is requeued, before its time limit or when preempted"
    )
    warn: PositiveInt = Field(
        default=180,
        description="seconds before the time limit at which the run saves and is requeued",
    )
    container: Literal["none", "pyxis", "apptainer"] = Field(
        default="none",
        description="container runtime of `image`: pyxis (srun --container-image) or apptainer",
    )
    image: Text | None = Field(
        default=None, description="container image: nvcr.io#nvidia/pytorch:25.10-py3, or a .sqsh or .sif file",
        examples=["stoker.sif"],
    )  # fmt: skip
    mounts: list[Text] = Field(
        default_factory=list,
        description="folders mounted into the container: [/data, /scratch:/scratch]",
        examples=[["/data"]],
    )
    sbatch: list[Text] = Field(
        default_factory=list,
        description="additional options of sbatch, such as [--mail-type=END]",
        examples=[["--mail-type=END"]],
    )

    @property
    def in_place(self) -> bool:
        """Returns whether the nodes share this machine's files: true if it is itself a login node."""
        return self.login is None
