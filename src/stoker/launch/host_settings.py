"""Sets the environment variables that this host needs, before its processes communicate."""

from __future__ import annotations

import os

from stoker.errors import UserError
from stoker.hardware.host_facts import HostFacts, host_facts
from stoker.hardware.measured.calibration import kept_calibration
from stoker.hardware.measured.nccl_settings import nccl_host
from stoker.hardware.quirks import Quirk, in_one_line, quirks_of
from stoker.launch.cluster_env import RankInfo


def set_quirks(rank_info: RankInfo, *, interface: str = "") -> str:
    """Sets the variables that this host needs and the user has not set; returns them in one line, empty if none.

    Args:
        interface: that the groups of this process bind to; empty if the libraries choose it.
    """
    facts = host_facts()
    quirks = quirks_of(
        facts,
        os.environ,
        processes=rank_info.local_world,
        meet=_hosts(rank_info),
        interface=interface,
        measured=_nccl_settings(facts, rank_info.world),
    )
    for quirk in quirks:
        os.environ |= quirk.variables
    return in_one_line(quirks)


def _nccl_settings(facts: HostFacts, world: int) -> list[Quirk]:
    """Returns the settings of NCCL that the calibration of this machine's GPUs found, or why they are not used."""
    if world < 2 or not facts.gpus:
        return []
    try:
        found = kept_calibration(facts.gpus[0], 0)
    except UserError as error:
        return [Quirk(error.problems[0].message)]
    if found is None or found.nccl is None or not found.nccl.variables:
        return []
    if invalid := found.nccl.invalid(nccl_host(facts, processes=world)):
        return [Quirk(f"the calibration's NCCL settings are not used: {invalid}")]
    return [Quirk(f"the fastest settings of NCCL, calibrated on {found.date}", found.nccl.variables)]


def _hosts(rank_info: RankInfo) -> tuple[str, ...]:
    """Addresses of the run's nodes, as far as this process knows them; none of a run on one."""
    if rank_info.local_world == rank_info.world:
        return ()
    first = rank_info.meet[0] if isinstance(rank_info.meet, tuple) else os.environ.get("MASTER_ADDR", "")
    own = rank_info.address if rank_info.node else ""
    return tuple(dict.fromkeys(host for host in (first, own) if host))
