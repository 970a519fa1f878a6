"""``target: {ssh: ...}``: hosts that are reached by OpenSSH."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from stoker.job.block import Text
from stoker.job.targets.shared_keys import Port, TargetKeys


class SshBlock(TargetKeys):
    """Hosts that OpenSSH reaches. Its own settings (~/.ssh/config, the agent) hold where nothing is given."""

    hosts: list[Text] = Field(
        default_factory=list,
        description="the hosts as lines of a host file: [gpu1 slots=8, user@gpu2 slots=8 address=10.0.0.2]",
        examples=[["gpu1 slots=8", "gpu2 slots=8"]],
    )
    hostfile: Text | None = Field(
        default=None,
        description="a host file as MPI and DeepSpeed read it: `gpu1 slots=8` on each line",
        examples=["hostfile"],
    )
    include: Text | None = Field(
        default=None,
        description="these hosts alone, and these of their slots: gpu1:0,2@gpu2",
        examples=["gpu1:0,2@gpu2"],
    )
    exclude: Text | None = Field(
        default=None, description="all but these hosts, or these of their slots: gpu1:3@gpu4", examples=["gpu1:3@gpu4"]
    )
    user: Text | None = Field(default=None, description="user on the hosts, unless the host names one", examples=["me"])
    ssh_port: Port | None = Field(default=None, description="port of the hosts' sshd", examples=[22])
    identity: Text | None = Field(
        default=None, description="file of the private key, beside the agent's", examples=["~/.ssh/id_ed25519"]
    )
    jump: Text | None = Field(
        default=None, description="hosts to go through, as `ssh -J` takes them", examples=["me@login:22"]
    )
    config: Text | None = Field(
        default=None, description="a file in the place of ~/.ssh/config", examples=["cluster.ssh"]
    )
    options: dict[str, str] = Field(
        default_factory=dict,
        description="options of ssh_config, such as {StrictHostKeyChecking: accept-new}",
        examples=[{"StrictHostKeyChecking": "accept-new"}],
    )
    connect: Annotated[int, Field(ge=1, le=3600)] = Field(
        default=15, description="seconds within which a host must answer"
    )
    folder: Text = Field(
        default="stoker", description="folder on the hosts, from the user's home; what is sent is in it"
    )
    shared: bool = Field(default=False, description="whether all hosts see one `folder`; it is then sent once")
    interface: Text | None = Field(
        default=None, description="network interface by which the hosts reach each other", examples=["eth1"]
    )
