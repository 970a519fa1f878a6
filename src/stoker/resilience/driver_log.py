"""Faults of GPUs that NVIDIA's driver writes to the kernel's log, as Xid messages.

Nothing of the log's text is passed on but the device's address, the code, and the driver's recovery action: a message
contains names of processes, which any user chooses.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from stoker.errors import Problem
from stoker.hardware.host_facts import pci_address
from stoker.hardware.process.program_output import program_output
from stoker.hardware.processor import has_nvidia_driver
from stoker.resilience.xid_catalogue import RECOVERY, REMEDIES, UNUSABLE, Kind, gravest_kind, meaning_of

SECONDS = 2.0  # that each program may take; the supervisor waits meanwhile
PROGRAMS = (
    ("dmesg",),
    ("journalctl", "-k", "-q", "--no-pager", "-n", "10000", "-o", "short-monotonic"),
)
UNREADABLE = (
    "the kernel's log, where NVIDIA's driver reports faults of GPUs, cannot be read: allow `dmesg`, or add this user "
    "to the group systemd-journal"
)
# [ 1234.567890] NVRM: Xid (PCI:0000:1b:00 GPU-I:05): 94, pid=7194, Contained: ...
ENTRY = re.compile(r"\[\s*(\d+\.\d+)\](.*)")
XID = re.compile(
    r"NVRM: Xid \((?:PCI:)?([0-9a-f]{1,8}):([0-9a-f]{1,2}):([0-9a-f]{1,2})(?:\.\d)?(?: [^)]{0,40})?\): (\d{1,4})\b(.*)",
    re.IGNORECASE,
)
ACTION = re.compile(r"changed from .{0,50} to \S{0,10} ?\(([A-Za-z0-9 ]{1,30})\)")


@dataclass(frozen=True)
class Xid:
    """A message of the driver.

    Attributes:
        address: PCI address of the device, such as ``0000:1b:00``.
        action: the recovery action that the driver asks for; empty in messages about something else.
    """

    address: str
    code: int
    action: str = ""


@dataclass(frozen=True)
class GpuFault:
    """What the driver reported about the device of a process.

    Attributes:
        codes: of the messages, without repetitions.
        action: the driver's last recovery action; empty if it named none.
        lost: whether the device cannot be used before a reset.
    """

    rank: int
    address: str
    codes: tuple[int, ...]
    kind: Kind
    action: str
    lost: bool

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Restores a fault from the output of `dataclasses.asdict`."""
        return cls(**{**values, "codes": tuple(values["codes"])})

    @property
    def problem(self) -> Problem:
        """The message for the user."""
        codes = ", ".join(f"{code} ({meaning_of(code)})" for code in self.codes)
        asks = f"; the driver asks for: {self.action}" if self.action else ""
        words = f"rank {self.rank}: NVIDIA's driver reported Xid {codes} for its GPU at {self.address}{asks}"
        return Problem(words, REMEDIES[self.kind])


class DriverLog:
    """The messages that the driver writes from now on. Without NVIDIA's driver there are none."""

    def __init__(self) -> None:
        self._seen: float | None = None  # time of the newest entry that has been read, in the kernel's clock
        self.read()

    def read(self) -> list[Xid] | None:
        """Returns the messages since the last call; None if the log cannot be read."""
        if not has_nvidia_driver():
            return []
        entries = _entries()
        seen, self._seen = self._seen, max((time for time, _ in entries), default=self._seen)
        if not entries or seen is None:
            return None
        return [xid for time, text in entries if time > seen and (xid := xid_of(text)) is not None]


def _entries() -> list[tuple[float, str]]:
    """Returns time and text of the kernel's log from the first program that may read it; a log is never empty."""
    for command in PROGRAMS:
        lines = (program_output(*command, seconds=SECONDS) or "").splitlines()
        if entries := [(float(found[1]), found[2]) for line in lines if (found := ENTRY.match(line))]:
            return entries
    return []


def xid_of(line: str) -> Xid | None:
    """Returns the message of a line; None if it has none."""
    found = XID.search(line)
    if found is None:
        return None
    domain, bus, device = (int(part, 16) for part in found.groups()[:3])
    code = int(found[4])
    action = ACTION.search(found[5]) if code == RECOVERY else None
    return Xid(pci_address(domain, bus, device), code, action[1] if action else "")


def gpu_faults(messages: Sequence[Xid], devices: Mapping[int, str]) -> list[GpuFault]:
    """Returns the faults of processes' devices.

    The driver's own recovery action decides whether a device is lost; drivers before R560 give none, and then the kind
    decides. Both ends of a link report its errors: a device is lost by one only if no other device reports a fault.

    Args:
        messages: about all devices of the machine.
        devices: address of the device of each rank.
    """
    of_device: dict[str, list[Xid]] = {}
    for message in messages:
        of_device.setdefault(message.address, []).append(message)
    kinds = {address: gravest_kind({message.code for message in own}) for address, own in of_device.items()}
    alone = sum(kind in UNUSABLE or kind == "link" for kind in kinds.values()) == 1
    faults = []
    for rank, address in devices.items():
        if address not in of_device:
            continue
        own, kind = of_device[address], kinds[address]
        action = next((message.action for message in reversed(own) if message.action), "")
        lost = kind in UNUSABLE or (kind == "link" and alone)
        if action:
            lost = "Reset" in action or "Reboot" in action
        codes = tuple(dict.fromkeys(message.code for message in own))
        faults.append(GpuFault(rank, address, codes, kind, action, lost))
    return faults


def write_address(folder: Path, rank: int, address: str) -> None:
    """Writes the address of a process' device to the run's folder in shared memory."""
    (folder / f"gpu-{rank}").write_text(address)


def read_addresses(folder: Path, ranks: Iterable[int]) -> dict[int, str]:
    """Returns the addresses that processes have written, by rank."""
    addresses = {}
    for rank in ranks:
        with suppress(OSError):
            addresses[rank] = (folder / f"gpu-{rank}").read_text()
    return addresses
