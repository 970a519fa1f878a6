"""Keys that every target has: the numbers of nodes and processes, and the environment of the processes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from stoker.job.block import Auto, Block, NaturalInt, PositiveInt, Text
from stoker.job.keys.text_forms import of_form
from stoker.sockets import LAST_PORT

Port = Annotated[int, Field(ge=1, le=LAST_PORT)]
Variable = Annotated[
    str, of_form(r"^[A-Za-z_][A-Za-z0-9_]*$", "a name of letters, digits and `_` that does not begin with a digit")
]


class TargetKeys(Block):
    """Keys of every target."""

    nodes: PositiveInt | Auto = Field(
        default="auto",
        description="number of nodes; auto: as many as the layout needs with `devices` processes on each",
    )
    devices: PositiveInt | Auto = Field(
        default="auto", description="processes on each node; auto: the layout's processes divided by the nodes"
    )
    cluster: Text | None = Field(
        default=None,
        description="hardware of the nodes, for `parallel: auto`: 4x8xH100, aws-p5, cpu, or a cluster file",
        examples=["4x8xH100"],
    )
    python: Text = Field(default="python3", description="Python interpreter on the nodes, with Stoker's dependencies")
    setup: list[Text] = Field(
        default_factory=list,
        description="shell commands before Stoker starts on a node, such as [module load cuda]",
        examples=[["module load cuda"]],
    )
    environment: dict[Variable, str] = Field(
        default_factory=dict,
        description="environment variables of the processes, such as {NCCL_DEBUG: INFO}",
        examples=[{"NCCL_DEBUG": "INFO"}],
    )
    forward: list[Text] = Field(
        default_factory=lambda: ["NCCL_*", "GLOO_*", "UCX_*", "HF_*", "WANDB_*", "STOKER_*"],
        description="environment variables of this shell to forward, by name or pattern",
        examples=[["NCCL_*", "HF_TOKEN"]],
    )
    send: list[Text] = Field(
        default_factory=list,
        description="additional files, folders or patterns that the job needs on the nodes, such as [my_rewards.py]",
        examples=[["my_rewards.py"]],
    )
    code: bool = Field(
        default=True, description="send the code of this Stoker; false: Stoker is installed on the nodes"
    )
    port: Port | Auto = Field(
        default="auto", description="rendezvous port of the nodes; auto: derived from the name of the run"
    )

    @property
    def in_place(self) -> bool:
        """Returns whether the nodes share this machine's files, so that data is not sent."""
        return False

    @property
    def instead_of_private(self) -> str:
        """What to write where files cannot be sent for their owner only; empty where they can."""
        return ""


class SpareKeys(TargetKeys):
    """Keys of targets whose nodes are hosts with a supervisor each."""

    spares: NaturalInt = Field(
        default=0, description="additional nodes that wait with everything imported, and replace nodes that are lost"
    )
