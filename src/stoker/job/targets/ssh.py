"""``target: {ssh: ...}``: hosts that are reached by OpenSSH."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from stoker.job.block import Text
from stoker.job.targets.shared_keys import Port, SpareKeys


class SshBlock(SpareKeys):
    """Hosts that OpenSSH reaches. Its own settings (~/.ssh/config, the agent) hold where nothing is given."""

    hosts: list[Text] = Field(
        default_factory=list,
        description="hosts as lines of a host file: [gpu1 slots=8, user@gpu2 slots=8 address=10.0.0.2]",
        examples=[["gpu1 slots=8", "gpu2 slots=8"]],
    )
    hostfile: Text | None = Field(
        default=None,
        description="host file in the format of MPI and DeepSpeed: `gpu1 slots=8` on each line",
        examples=["hostfile"],
    )
    include: Text | None = Field(
        default=None,
        description="use only these hosts or slots: gpu1:0,2@gpu2",
        examples=["gpu1:0,2@gpu2"],
    )
    exclude: Text | None = Field(
        default=None, description="use all hosts or slots except these: gpu1:3@gpu4", examples=["gpu1:3@gpu4"]
    )
    user: Text | None = Field(default=None, description="user on the hosts, unless the host names one", examples=["me"])
    ssh_port: Port | None = Field(default=None, description="port of the hosts' sshd", examples=[22])
    identity: Text | None = Field(
        default=None,
        description="private key file, in addition to the keys of the agent",
        examples=["~/.ssh/id_ed25519"],
    )
    jump: Text | None = Field(default=None, description="jump hosts, as for `ssh -J`", examples=["me@login:22"])
    config: Text | None = Field(
        default=None, description="configuration file to use instead of ~/.ssh/config", examples=["cluster.ssh"]
    )
    options: dict[str, str] = Field(
        default_factory=dict,
        description="options of ssh_config, such as {StrictHostKeyChecking: accept-new}",
        examples=[{"StrictHostKeyChecking": "accept-new"}],
    )
    connect: Annotated[int, Field(ge=1, le=3600)] = Field(
        default=15, description="timeout of connections to the hosts in seconds"
    )
    folder: Text = Field(
        default="stoker", description="folder on the hosts for the files that are sent, relative to the user's home"
    )
    shared: bool = Field(
        default=False, description="whether `folder` is shared by all hosts, so that files are sent once"
    )
    interface: Text | None = Field(default=None, description="network interface between the hosts", examples=["eth1"])
