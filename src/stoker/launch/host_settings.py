"""Sets the environment variables that this host needs, before its processes communicate."""

from __future__ import annotations

import os

from stoker.hardware.host_facts import host_facts
from stoker.hardware.quirks import in_one_line, quirks_of
from stoker.launch.cluster_env import RankInfo


def set_quirks(rank_info: RankInfo, *, interface: str = "") -> str:
    """Sets the variables that this host needs and the user has not set; returns them in one line, empty if none.

    Args:
        interface: that the groups of this process bind to; empty if the libraries choose it.
    """
    processes = rank_info.local_world
    quirks = quirks_of(host_facts(), os.environ, processes=processes, meet=_hosts(rank_info), interface=interface)
    for quirk in quirks:
        os.environ |= quirk.variables
    return in_one_line(quirks)


def _hosts(rank_info: RankInfo) -> tuple[str, ...]:
    """Addresses of the run's nodes, as far as this process knows them; none of a run on one."""
    if rank_info.local_world == rank_info.world:
        return ()
    first = rank_info.meet[0] if isinstance(rank_info.meet, tuple) else os.environ.get("MASTER_ADDR", "")
    own = rank_info.address if rank_info.node else ""
    return tuple(dict.fromkeys(host for host in (first, own) if host))
