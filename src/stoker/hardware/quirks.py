"""Environment variables that an unusual host needs, each with its reason; variables of the user are kept."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from stoker.hardware.host_facts import HostFacts
from stoker.units import MIB

# NVIDIA's consumer cards since the 40 series have no peer access: NCCL hangs or fails over it with older drivers.
WITHOUT_PEERS = re.compile(r"GeForce RTX [45]0\d0")
SHM_OF_PROCESS = 64 * MIB  # bytes of /dev/shm for each process below which NCCL's buffers may not fit
PROXIES = ("http_proxy", "https_proxy", "all_proxy")


@dataclass(frozen=True)
class Quirk:
    """A peculiarity of a host.

    Attributes:
        why: the detected fact, for people.
        variables: variables to set because of it; empty if it can only be reported.
    """

    why: str
    variables: Mapping[str, str] = field(default_factory=dict)


def quirks_of(
    facts: HostFacts,
    environment: Mapping[str, str],
    *,
    processes: int,
    meet: Sequence[str] = (),
    interface: str = "",
    measured: Sequence[Quirk] = (),
) -> list[Quirk]:
    """Returns the quirks of a host.

    Args:
        environment: the variables that are set: none is changed, and a quirk that would set only these is left out.
        processes: on this host.
        meet: addresses of the run's nodes; none of a run on one.
        interface: that the groups of the processes bind to; empty if the libraries choose it.
        measured: further quirks, which a calibration found.
    """
    found = [*_peers(facts, processes), *_network(facts, meet), *_interfaces(facts, interface)]
    found += [*_shm(facts, processes), *_limits(facts, processes), *measured]
    quirks = []
    for quirk in found:
        left = {name: value for name, value in quirk.variables.items() if name not in environment}
        if left or not quirk.variables:
            quirks.append(Quirk(quirk.why, left))
    return quirks + list(_proxies(environment, meet))


def in_one_line(quirks: Sequence[Quirk]) -> str:
    """Returns the quirks for the user: ``NCCL_P2P_DISABLE=1 (GeForce RTX 4090: no peer access); ...``."""
    parts = []
    for quirk in quirks:
        settings = " ".join(f"{name}={value}" for name, value in quirk.variables.items())
        parts.append(f"{settings} ({quirk.why})" if settings else quirk.why)
    return "; ".join(parts)


def _peers(facts: HostFacts, processes: int) -> Iterator[Quirk]:
    """Cards that cannot read each other's memory, and cards that differ."""
    if len(facts.gpus) > 1 and processes > 1:
        without = next((name for name in facts.gpus if WITHOUT_PEERS.search(name)), None)
        if without is not None:
            yield Quirk(f"{without}: no peer access", {"NCCL_P2P_DISABLE": "1"})
    if facts.mig and processes > 1:
        yield Quirk("MIG: parts of a card have no peer access", {"NCCL_P2P_DISABLE": "1"})
    kinds = Counter(facts.gpus)
    if len(kinds) > 1:
        listed = ", ".join(f"{count} x {name}" for name, count in kinds.items())
        yield Quirk(f"the GPUs differ ({listed}): each step takes as long as the slowest needs")


def _network(facts: HostFacts, meet: Sequence[str]) -> Iterator[Quirk]:
    if meet and facts.gpus and not facts.infiniband:
        yield Quirk("no InfiniBand", {"NCCL_IB_DISABLE": "1"})


def _interfaces(facts: HostFacts, interface: str) -> Iterator[Quirk]:
    """Yields the node's network interface: if there are several, the libraries might choose another one."""
    if interface and facts.interfaces > 1:
        why = f"{facts.interfaces} network interfaces: {interface} has the node's address"
        yield Quirk(why, bound_to(interface))


def bound_to(interface: str) -> dict[str, str]:
    """Returns the variables with which gloo and NCCL bind to a network interface."""
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}


def _shm(facts: HostFacts, processes: int) -> Iterator[Quirk]:
    if facts.gpus and processes > 1 and facts.shm is not None and facts.shm < SHM_OF_PROCESS * processes:
        have = f"/dev/shm has {facts.shm // MIB} MiB; `--shm-size=1g` of a container is faster"
        yield Quirk(have, {"NCCL_SHM_DISABLE": "1"})


def _limits(facts: HostFacts, processes: int) -> Iterator[Quirk]:
    if facts.core_limit is not None and facts.core_limit < facts.cores:
        threads = max(1, int(facts.core_limit) // processes)
        yield Quirk(f"the control group allows {facts.core_limit:g} cores", {"OMP_NUM_THREADS": str(threads)})
    if facts.memory_limit is not None and facts.memory_limit < 1024 * MIB * processes:
        yield Quirk(f"the control group allows {facts.memory_limit // MIB} MiB of memory for {processes} processes")


def _proxies(environment: Mapping[str, str], meet: Sequence[str]) -> Iterator[Quirk]:
    """Adds the run's own nodes to the user's ``no_proxy``, since they are not reached through a proxy."""
    lower = {name.lower(): value for name, value in environment.items() if name.lower() in (*PROXIES, "no_proxy")}
    if not meet or not any(lower.get(name) for name in PROXIES):
        return
    listed = [host.strip() for host in lower.get("no_proxy", "").split(",") if host.strip()]
    more = [host for host in dict.fromkeys(meet) if host not in listed and "*" not in listed]
    if more:
        value = ",".join([*listed, *more])
        yield Quirk("the nodes are not behind the proxy", {"no_proxy": value, "NO_PROXY": value})
