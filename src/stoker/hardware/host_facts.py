"""Facts about a host that affect communication, from system files: no device is opened."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

VISIBLE = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")  # the second is that of containers
LOOPBACK = "772"  # type of an interface, ARPHRD_LOOPBACK of Linux


@dataclass(frozen=True)
class HostFacts:
    """The detected facts of a host.

    Attributes:
        gpus: names of NVIDIA's cards that the processes see, in the order of the bus.
        addresses: their PCI addresses.
        driver: version of NVIDIA's driver; empty without one.
        mig: whether they see parts of cards.
        infiniband: whether it has a port of InfiniBand or RoCE.
        interfaces: number of its network interfaces that are up, without loopback.
        shm: bytes of /dev/shm; None without one.
        memory_limit: bytes that the control group allows; None without a limit.
        core_limit: cores' worth of time that the control group allows; None without a limit.
        cores: that this process may run on.
    """

    gpus: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    driver: str = ""
    mig: bool = False
    infiniband: bool = False
    interfaces: int = 0
    shm: int | None = None
    memory_limit: int | None = None
    core_limit: float | None = None
    cores: int = 1


def host_facts(environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> HostFacts:
    """Returns the facts of this host.

    Args:
        root: the folder of /proc, /sys and /dev.
    """
    visible = environment.get(VISIBLE[0])
    memory_limit, core_limit = control_group_limits(root)
    cards = _gpus(root, visible)
    return HostFacts(
        gpus=tuple(name for _, name in cards),
        addresses=tuple(address for address, _ in cards),
        driver=_driver(root),
        mig=any("MIG-" in environment.get(name, "") for name in VISIBLE),
        infiniband=any(_entries(root / "sys/class/infiniband")),
        interfaces=sum(map(_is_up, _entries(root / "sys/class/net"))),
        shm=_shm(root / "dev/shm"),
        memory_limit=memory_limit,
        core_limit=core_limit,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
    )


def pci_address(domain: int, bus: int, device: int) -> str:
    """Returns the PCI address of a GPU as NVIDIA's driver writes it, such as ``0000:1b:00``."""
    return f"{domain:04x}:{bus:02x}:{device:02x}"


def control_group_limits(root: Path = Path("/")) -> tuple[int | None, float | None]:
    """Returns the bytes of memory, and the cores' worth of time, that the control group allows; None without a limit.

    Args:
        root: the folder of /sys.
    """
    group = root / "sys/fs/cgroup"
    memory = _limit(group / "memory.max") or _limit(group / "memory/memory.limit_in_bytes")
    return memory, _core_limit(group)


def _gpus(root: Path, visible: str | None) -> list[tuple[str, str]]:
    """PCI address and name of the cards, those alone that CUDA_VISIBLE_DEVICES numbers."""
    cards = []
    for folder in _entries(root / "proc/driver/nvidia/gpus"):
        found = re.search(r"^Model:\s*(.+)$", _text(folder / "information"), re.MULTILINE)
        if found is not None:
            cards.append((folder.name, found[1].strip()))
    if visible is None or not re.fullmatch(r"\d+(,\d+)*", visible):
        return [] if visible == "" else cards
    return [cards[int(number)] for number in visible.split(",") if int(number) < len(cards)]


def _driver(root: Path) -> str:
    """Version of NVIDIA's driver: ``NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar ...``."""
    found = re.search(r"^NVRM version:.*?\s(\d+\.[\d.]+)\s", _text(root / "proc/driver/nvidia/version"), re.MULTILINE)
    return found[1] if found else ""


def _is_up(interface: Path) -> bool:
    """Returns whether an interface of /sys/class/net is up, and not loopback."""
    return _text(interface / "operstate").strip() == "up" and _text(interface / "type").strip() != LOOPBACK


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _shm(folder: Path) -> int | None:
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_frsize * found.f_blocks


def _limit(file: Path) -> int | None:
    """Returns a limit of a control group; None for ``max``, and for the number that means the same in version 1."""
    text = _text(file).strip()
    return int(text) if text.isdecimal() and int(text) < 2**60 else None


def _core_limit(group: Path) -> float | None:
    quota, _, period = _text(group / "cpu.max").strip().partition(" ")  # version 2
    if not quota:
        quota = _text(group / "cpu/cpu.cfs_quota_us").strip()
        period = _text(group / "cpu/cpu.cfs_period_us").strip()
    if not quota.isdecimal() or not period.isdecimal() or int(period) == 0:  # max, or -1
        return None
    return int(quota) / int(period)
