"""Keys that every target has: the numbers of nodes and processes, and the environment of the processes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from stoker.job.block import Auto, Block, PositiveInt, Text

Port = Annotated[int, Field(ge=1, le=65535)]


class TargetKeys(Block):
    """Keys of every target."""

    nodes: PositiveInt | Auto = Field(
        default="auto", description="nodes; auto: as many as the layout's processes fill, `devices` on each"
    )
    devices: PositiveInt | Auto = Field(
        default="auto", description="processes on each node; auto: the layout's processes over the nodes"
    )
    cluster: Text | None = Field(
        default=None,
        description="what the nodes are, for `parallel: auto`: 4x8xH100, aws-p5, cpu, or a cluster file",
        examples=["4x8xH100"],
    )
    python: Text = Field(default="python3", description="the Python on the nodes, which has Stoker's dependencies")
    setup: list[Text] = Field(
        default_factory=list,
        description="shell commands before Stoker starts on a node, such as [module load cuda]",
        examples=[["module load cuda"]],
    )
    environment: dict[str, str] = Field(
        default_factory=dict,
        description="variables of the processes, such as {NCCL_DEBUG: INFO}",
        examples=[{"NCCL_DEBUG": "INFO"}],
    )
    forward: list[Text] = Field(
        default_factory=lambda: ["NCCL_*", "GLOO_*", "UCX_*", "HF_*", "WANDB_*", "STOKER_*"],
        description="variables of this shell that are handed on, by name or pattern",
        examples=[["NCCL_*", "HF_TOKEN"]],
    )
    send: list[Text] = Field(
        default_factory=list,
        description="further files, folders or patterns that the job needs there, such as [my_rewards.py]",
        examples=[["my_rewards.py"]],
    )
    code: bool = Field(
        default=True, description="send this Stoker's own code; false: the nodes have one installed already"
    )
    port: Port | Auto = Field(default="auto", description="where the nodes meet; auto: one that the run's name gives")

    @property
    def in_place(self) -> bool:
        """Returns whether the nodes share this machine's files, so that data is not sent."""
        return False

    @property
    def instead_of_private(self) -> str:
        """What to write where files cannot be sent for their owner only; empty where they can."""
        return ""
