"""Finds the device that a name means, in any spelling, with the figures that the name states."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace
from functools import cache

from stoker.errors import Problem, UserError
from stoker.hardware.machines.device_catalogue import CATALOGUE, DeviceKind

# Parts of a device's name that do not identify it.
_NOISE = re.compile(
    r"nvidia|amd|instinct|tesla|geforce|ampere|hopper|blackwell|tensorcore|accelerator|graphics|device|"
    r"\boam\b|\bgpu\b|\bac\b|\bnvl72\b|\bnvl36\b|\brtx\b"
)
_MEMORY = re.compile(r"\b(\d{2,3}) ?(?:gb|gib|g)\b")
_FORM = re.compile(r"\b(sxm\d?|pcie|nvl)\b")
_SIZES = {  # other sizes in names: nominal ones, or those of another maker's page
    "141": ("140", "144"), "180": ("192",), "186": ("192", "184"), "270": ("288",), "279": ("288",), "64": ("128",),
    "96": ("95", "480"), "94": ("93",),
}  # fmt: skip
_STACK = re.compile(r"\bhbm(\d?e?)\b")
_WATTS = re.compile(r"\b(\d{3,4}) ?w(?:atts?)?\b")
_RATE = re.compile(r"\b(\d+(?:\.\d+)?) ?([tg])b ?(?:/ ?s|ps)\b")
# GB/s per stack of memory by generation, from the catalogue's devices, and the generation of each device.
STACKS = {"2": 311.0, "2e": 400.0, "3": 670.0, "3e": 800.0}
GENERATIONS = {
    "V100": "2", "A100-40GB": "2", "A100-80GB": "2e", "A800": "2e", "H100-80GB-SXM": "3", "H100-80GB-PCIe": "2e",
    "H100-94GB": "3", "H100-96GB": "2e", "H200": "3e", "GH200": "3", "H800": "3", "H20-": "3", "B200": "3e",
    "B300": "3e", "GB200": "3e", "GB300": "3e", "MI250": "2e", "MI300": "3", "MI325X": "3e", "MI35": "3e",
}  # fmt: skip
WATTS = {
    "V100": 300, "A100": 400, "A800": 400, "H100": 700, "H800": 700, "H200": 700, "H20": 400, "GH200": 700,
    "B200": 1000, "B300": 1400, "GB200": 1200, "GB300": 1400, "MI250X": 280, "MI250": 280, "MI300A": 550,
    "MI300X": 750, "MI325X": 1000, "MI350X": 1000, "MI355X": 1400,
}  # fmt: skip
FARTHEST = 2.0  # factor of the nearest device's memory beyond which it must be another device


@dataclass(frozen=True)
class _Stated:
    """The parts of a device's name; None and empty for those that it leaves out."""

    family: str
    gigabytes: int | None
    form: str
    stack: str
    watts: int | None
    gbs: float | None


def _parsed(name: str) -> _Stated:
    text = name.lower().replace("hbm2.0", "hbm2")
    rate = _RATE.search(text)
    text = _RATE.sub(" ", text)
    text = re.sub(r"[\s_\-/,()]+", " ", text)
    text = re.sub(r"(?<=\D)(?=\d{2,3} ?gb\b)", " ", text)  # A100SXM40GB
    text = re.sub(r"(?<=\d)(?=sxm|pcie)", " ", text)
    text = re.sub(r"\b(rtx|tpu) ?(?=a?\d|v\d)", r"\1", text)
    memory, form, stack, watts = (found.search(text) for found in (_MEMORY, _FORM, _STACK, _WATTS))
    rest = text
    for part in (_WATTS, _STACK, _MEMORY, _FORM, _NOISE):
        rest = part.sub(" ", rest)
    return _Stated(
        family="".join(rest.split()).replace("gcd", "").removeprefix("rtx").removeprefix("tpu"),
        gigabytes=int(memory[1]) if memory else None,
        form=form[1].rstrip("0123456789") if form else "",
        stack=stack[1] if stack else "",
        watts=int(watts[1]) if watts else None,
        gbs=float(rate[1]) * (1000 if rate[2] == "t" else 1) if rate else None,
    )


@cache
def device_kind(name: str) -> DeviceKind:
    """Returns the device of a name in any spelling: ``H100``, ``NVIDIA H100 80GB HBM3``, ``rtx 4090``.

    It is the nearest device of its family; where the name states others (``A100-64GB``, ``H100-80GB-HBM2e-500W``), its
    memory, bandwidth and power replace the catalogue's.

    Raises:
        UserError: the catalogue has no such device; the error names the nearest.
    """
    stated = _parsed(name)
    size = stated.gigabytes
    family = [kind for kind in CATALOGUE if _first_word(kind) == stated.family]
    found = [kind for kind in family if size is None or str(size) in _sizes_of(kind)]
    if not found and size is not None and family:
        nearest = min(family, key=lambda kind: abs(size - _nominal(kind)))
        if 1 / FARTHEST <= size / _nominal(nearest) <= FARTHEST:
            found = [nearest]
    if stated.form and any(map(_form_of, found)):
        found = [kind for kind in found if _form_of(kind) == stated.form]
    if not found:
        names = [kind.name for kind in CATALOGUE]
        raise UserError(Problem(f"`{name}` is not a device of the catalogue", f"write {_nearest_names(name, names)}"))
    if stated.stack:  # the nearest with that memory, if the form leaves it open
        found = [kind for kind in found if _generation(kind) == stated.stack] or found
    return _with_differences(found[0], stated)


def _with_differences(kind: DeviceKind, stated: _Stated) -> DeviceKind:
    """Returns the device with the memory, memory generation, bandwidth and power limit that a name states."""
    changes: dict[str, float] = {}
    name = [kind.name.split("-")[0], f"{stated.gigabytes or _nominal(kind)}GB", _form_of(kind).upper()]
    own, factor = _generation(kind), 1.0
    if stated.gigabytes is not None and str(stated.gigabytes) not in _sizes_of(kind):
        factor = stated.gigabytes / _nominal(kind)  # more stacks, or fewer
        changes["memory_gib"] = round(kind.memory_gib * factor, 2)
    if own and stated.stack in STACKS and stated.stack != own:  # others
        factor = STACKS[stated.stack] / STACKS[own]
        name.append(f"HBM{stated.stack}")
    if stated.gbs is not None:
        name.append(f"{stated.gbs:g}GBps")
    if stated.gbs is not None or factor != 1:
        changes["memory_gbs"] = stated.gbs or round(kind.memory_gbs * factor)
    full = WATTS.get(name[0])
    if stated.watts is not None and full is not None and kind.link != "PCIe":
        changes["power"] = stated.watts / full
        name.append(f"{stated.watts}W")
    if all(getattr(kind, key) == value for key, value in changes.items()):
        return kind
    source = f"as {kind.name}; {kind.source}"
    return replace(kind, name="-".join(filter(None, name)), like=kind.name, source=source, **changes)  # type: ignore[arg-type]


def _generation(kind: DeviceKind) -> str:
    """Returns the generation of the device's stacked memory; empty if it has none."""
    return next((found for name, found in GENERATIONS.items() if kind.name.startswith(name)), "")


def _nominal(kind: DeviceKind) -> int:
    """Returns the nominal gigabytes, from its name."""
    sizes = _sizes_of(kind)
    return int(sizes[0]) if sizes else round(kind.memory_gib)


def _first_word(kind: DeviceKind) -> str:
    return kind.name.split("-")[0].lower().removeprefix("rtx").removeprefix("tpu")


def _form_of(kind: DeviceKind) -> str:
    found = _FORM.search(kind.name.lower().replace("-", " "))
    return found[1].rstrip("0123456789") if found else ""


def _sizes_of(kind: DeviceKind) -> tuple[str, ...]:
    found = _MEMORY.search(kind.name.lower().replace("-", " "))
    return (found[1], *_SIZES.get(found[1], ())) if found else ()


def _nearest_names(name: str, names: list[str]) -> str:
    """Returns the names of the family that is named, else those most like the one given, else all families."""
    families = list(dict.fromkeys(candidate.split("-")[0] for candidate in names))
    near = [candidate for candidate in names if candidate.split("-")[0].lower() in name.lower()]
    if not near:
        by_case = {candidate.lower(): candidate for candidate in (*families, *names)}
        word = re.sub(r"nvidia|amd|\s", "", name.lower())
        near = [by_case[found] for found in difflib.get_close_matches(word, list(by_case), n=3, cutoff=0.6)]
    return " or ".join(near) if near else "one of " + ", ".join(families)
