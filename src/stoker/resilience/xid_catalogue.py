"""NVIDIA's Xid errors: what each code means, the kind of fault, and the remedy.

Source: NVIDIA, "Analyzing Xid Errors with the Xid Catalog" (docs.nvidia.com/deploy/xid-errors). The kinds follow its
immediate actions: after RESTART_APP and IGNORE a device can be used, after RESET_GPU and RESTART_BM it cannot.
"""

from __future__ import annotations

from typing import Literal

Kind = Literal["bus", "memory", "firmware", "link", "contained", "application", "unknown", "notice"]

# In the order of their gravity.
REMEDIES: dict[Kind, str] = {
    "bus": "switch the machine off and on; if it recurs, check the GPU's seat, power and cooling, or have it replaced",
    "memory": "reset the GPU (`nvidia-smi -r`); if it recurs, have it tested and replaced",
    "firmware": "reset the GPU (`nvidia-smi -r`) or restart the machine; if it recurs, update the driver",
    "link": "reset the GPUs (`nvidia-smi -r`); `nvidia-smi nvlink -e` counts the errors of each link",
    "contained": "the GPU can be used; reset it (`nvidia-smi -r`) once nothing runs on it",
    "application": "if it recurs on other GPUs, a kernel of the program or of a library is wrong",
    "unknown": "see NVIDIA's Xid catalog",
    "notice": "nothing has to be done at once",
}
UNUSABLE: frozenset[Kind] = frozenset({"bus", "memory", "firmware"})  # until a reset
CONTAINED, ECC, RECOVERY = 94, 48, 154
UNCONTAINED = frozenset({64, 95, 140})

XIDS: dict[int, tuple[str, Kind]] = {
    8: ("GPU stopped processing", "application"),
    11: ("invalid command stream", "application"),
    13: ("graphics engine exception", "application"),
    25: ("invalid command stream", "application"),
    31: ("memory page fault", "application"),
    32: ("invalid command stream", "application"),
    38: ("driver firmware error", "application"),
    39: ("copy engine exception", "application"),
    40: ("copy engine exception", "application"),
    41: ("copy engine exception", "application"),
    43: ("GPU stopped processing", "application"),
    44: ("fault during a context switch", "application"),
    45: ("clean-up after an earlier error", "application"),
    46: ("GPU stopped processing", "firmware"),
    48: ("uncorrectable ECC error", "memory"),
    61: ("micro-controller breakpoint", "firmware"),
    62: ("micro-controller halt", "firmware"),
    63: ("memory row is to be remapped", "notice"),
    64: ("memory row could not be remapped", "memory"),
    69: ("graphics engine class error", "application"),
    74: ("NVLink error", "link"),
    79: ("GPU has fallen off the bus", "bus"),
    80: ("corrupted data sent to the GPU", "application"),
    92: ("high rate of correctable ECC errors", "notice"),
    94: ("contained memory error", "contained"),
    95: ("uncontained memory error", "memory"),
    109: ("context switch timeout", "firmware"),
    110: ("security fault", "firmware"),
    119: ("GSP timeout", "firmware"),
    120: ("GSP error", "firmware"),
    136: ("NVLink training failed", "link"),
    140: ("unrecovered ECC error", "memory"),
    143: ("GPU initialization error", "firmware"),
    **dict.fromkeys(range(144, 151), ("NVLink error", "link")),
    154: ("recovery action changed", "notice"),
    155: ("NVLink error", "link"),
    156: ("memory resource is to be retired", "memory"),
    158: ("GPU timeout", "firmware"),
    167: ("PCIe timeout", "bus"),
    171: ("uncorrectable DRAM error", "notice"),  # in addition to 48
    172: ("uncorrectable SRAM error", "notice"),  # in addition to 48
}


def meaning_of(code: int) -> str:
    """Returns what a code means."""
    return XIDS.get(code, ("unknown", "unknown"))[0]


def gravest_kind(codes: set[int]) -> Kind:
    """Returns the gravest kind of several codes of one device.

    An uncorrectable ECC error that the driver reports as contained has harmed the process only.
    """
    if CONTAINED in codes and not codes & UNCONTAINED:
        codes = codes - {ECC}
    kinds = {XIDS.get(code, ("", "unknown"))[1] for code in codes}
    return next(kind for kind in REMEDIES if kind in kinds)
