"""Parses a description of a network: GB/s of a node, one way, and its rails."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from stoker.hardware.machines.device_catalogue import DeviceKind
from stoker.hardware.machines.nodes import NODE_TYPES

# Gb/s of a port of four lanes (two where the name says so), by generation (InfiniBand Trade Association roadmap).
GENERATIONS = {
    "fdr": 56, "edr": 100, "hdr100": 100, "hdr200": 200, "hdr": 200, "ndr200": 200, "ndr400": 400, "ndr": 400,
    "xdr800": 800, "xdr": 800,
}  # fmt: skip
_INSIDE = re.compile(r"nvlink|nvswitch|nvl\d+|pcie|infinity fabric|xgmi|intra|single node|within", re.I)
_EFA = re.compile(r"\befa\b", re.I)
_ACROSS = re.compile(r"inter|across|per node|between", re.I)
_COUNT = r"(?:(?P<before>\d+)\s*[x×*]\s*(?:[A-Za-z-]{3,}\s+){0,3}|\b)"
_AFTER = r"(?:\s*[x×*]\s*(?P<after>\d+))?"
_RATE = re.compile(
    _COUNT + r"(?P<value>\d+(?:\.\d+)?)\s*(?P<scale>[TGtgM])(?P<unit>[bB])?(?:i?ts?|yte|E)?\s*(?:/\s*s|p/?s)?" + _AFTER
)
_NAMED = re.compile(
    _COUNT + rf"(?P<generation>{'|'.join(sorted(GENERATIONS, key=len, reverse=True))})\b" + _AFTER, re.I
)
_SCALES = {"t": 1000.0, "g": 1.0, "m": 0.001}


@dataclass(frozen=True)
class Network:
    """A node's connection to the others.

    Attributes:
        gbs: GB/s, one way, of all rails together.
        rails: ports that share it.
        fabric: its kind where that matters: ``EFA``.
    """

    gbs: float
    rails: int = 1
    fabric: str = ""


def parse_network(text: str, device: DeviceKind | None = None, *, per_node: int = 8) -> Network | None:
    """Parses the network that a text describes; None if it describes none.

    ``4x100Gb RoCE``, ``1600 Gb/s``, ``8x HDR200 IB per node``, ``400Gb/s x 8``, ``25 GB/s`` (bytes: a large B);
    ``EFA`` alone is AWS's network for nodes of the device. The link inside a node is ignored.

    Args:
        device: determines the rate of ``EFA``.
        per_node: devices of a node, for a rate ``per GPU``.
    """
    for part in re.split(r"[,;+]| and | with ", text):
        if _INSIDE.search(part) and not _ACROSS.search(part):
            continue
        found = _NAMED.search(part) or _RATE.search(part)
        if found is not None:
            ports = int(found["before"] or found["after"] or 1)
            if re.search(r"per[ -]?(gpu|device|rank|card)|/gpu", part, re.I):
                ports *= per_node
            return Network(_port(found.groupdict()) * ports, ports, "EFA" if _EFA.search(text) else "")
        if _EFA.search(part) and device is not None:
            aws = [
                node
                for node in NODE_TYPES
                if node.name.startswith("aws-") and node.device in (device.name, device.like)
            ]
            found_there = parse_network(aws[0].network) if aws else None
            return replace(found_there, fabric="EFA") if found_there else None
    return None


def describes_node(text: str) -> bool:
    """Returns whether a text describes the link inside a node."""
    return bool(_INSIDE.search(text))


def _port(found: dict[str, str | None]) -> float:
    """Returns the GB/s of one port."""
    if "generation" in found and found["generation"] is not None:
        return GENERATIONS[found["generation"].lower()] / 8
    value = float(found["value"] or 0) * _SCALES[(found["scale"] or "G").lower()]
    return value if found["unit"] == "B" else value / 8
