"""Settings of NCCL that a calibration found to be the fastest, and what they are valid for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stoker.hardware.host_facts import HostFacts


@dataclass(frozen=True)
class NcclHost:
    """What the speed of collectives within a machine depends on.

    Attributes:
        nccl: NCCL's version.
        driver: version of NVIDIA's driver.
        processes: that communicate, one for each GPU.
        gpus: PCI address and name of each GPU.
    """

    nccl: str
    driver: str
    processes: int
    gpus: tuple[str, ...]


@dataclass(frozen=True)
class NcclSettings:
    """The environment variables with which NCCL was fastest.

    Attributes:
        host: where they were measured.
        variables: none if NCCL's own choices were the fastest.
        failed: settings that could not be measured, each with its reason.
    """

    host: NcclHost
    variables: Mapping[str, str] = field(default_factory=dict)
    failed: tuple[str, ...] = ()

    def invalid(self, here: NcclHost) -> str:
        """Returns why the settings are not valid for a run; empty if they are."""
        there = self.host
        if there.nccl != here.nccl:
            return f"NCCL {there.nccl} was measured, and {here.nccl} is installed"
        if there.driver != here.driver:
            return f"driver {there.driver} was measured, and {here.driver} is installed"
        if there.processes != here.processes:
            return f"{there.processes} GPUs were measured, and the run has {here.processes} processes"
        return "other GPUs were measured" if there.gpus != here.gpus else ""


def nccl_host(facts: HostFacts, *, processes: int) -> NcclHost:
    """Returns this machine's versions and GPUs for a group of processes."""
    gpus = tuple(map(" ".join, zip(facts.addresses, facts.gpus, strict=True)))
    return NcclHost(nccl_version(), facts.driver, processes, gpus)


def nccl_version() -> str:
    """Returns the version of NCCL; empty if torch is built without it."""
    import torch
    import torch.distributed as dist

    return ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else ""
