"""Numbers and bytes of collectives, by axis and kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


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
    kind: str


Volumes = Mapping[Flow, Volume]


def added(*parts: Volumes) -> dict[Flow, Volume]:
    """The sum of several, flow by flow; flows that move nothing and are never called are left out."""
    total: dict[Flow, Volume] = {}
    for part in parts:
        for flow, volume in part.items():
            total[flow] = total.get(flow, Volume(0, 0)) + volume
    return {flow: volume for flow, volume in total.items() if volume.calls}
