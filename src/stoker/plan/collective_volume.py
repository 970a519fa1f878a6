"""What collectives move: how many of a kind, how many bytes, and how many of those cross a process' link."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "send", "receive", "reduce", "gather",
    "scatter", "barrier",
]  # fmt: skip


@dataclass(frozen=True)
class Volume:
    """Collectives of one kind over one axis.

    Attributes:
        calls: how many.
        size: bytes of the whole tensors: what an all-gather gathers, a reduce-scatter scatters, an all-reduce sums;
            what this process gives to an all-to-all, its own part included; the message of a send; this process' part
            of a gather or scatter.
    """

    calls: int
    size: int

    def __add__(self, other: Volume) -> Volume:
        return Volume(self.calls + other.calls, self.size + other.size)

    def __mul__(self, times: int) -> Volume:
        return Volume(self.calls * times, self.size * times)


@dataclass(frozen=True)
class Flow:
    """A kind of collective over an axis of the mesh; the kind is the operator's name where it has no other."""

    axis: str
    kind: Kind | str


Volumes = Mapping[Flow, Volume]


def added(*parts: Volumes) -> dict[Flow, Volume]:
    """The sum of several, flow by flow; flows that move nothing and are never called are left out."""
    total: dict[Flow, Volume] = {}
    for part in parts:
        for flow, volume in part.items():
            total[flow] = total.get(flow, Volume(0, 0)) + volume
    return {flow: volume for flow, volume in total.items() if volume.calls}


def wire_bytes(kind: Kind | str, size: int, processes: int) -> float:
    """Bytes that each process sends when a collective over tensors of ``size`` bytes runs as a ring.

    An all-reduce is a reduce-scatter and an all-gather (Patarasuk and Yuan, 2009), which is why DDP and ZeRO-2
    move the same (Rajbhandari et al., 2020, section 7).
    """
    others = (processes - 1) / processes
    factor = {
        "all-reduce": 2 * others,
        "all-gather": others,
        "reduce-scatter": others,
        "all-to-all": others,
        "broadcast": others,  # the ring passes it on; the last one does not
        "reduce": others,
        "send": 1.0,
        "receive": 0.0,  # counted by who sends
        "gather": 1.0,
        "scatter": 0.0,  # the root sends; counting it for all would count it twice
        "barrier": 0.0,
    }
    return factor[kind] * size
