"""How much of a device's and a link's figures real work reaches: few numbers, each with its meaning."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.hardware.devices import DeviceKind


@dataclass(frozen=True)
class Efficiency:
    """Shares of the datasheet's figures that training reaches.

    Attributes:
        matmul: of the peak, by large products in 16 bits and wider.
        low_matmul: the same in 8 bits and fewer, whose operands have to be scaled and cast.
        half_rows: tokens of a product at which it reaches half of that.
        attention: of the 16-bit peak, by fused attention.
        scores: of the memory's bandwidth, by attention that writes its scores out.
        bandwidth: of the memory's, by everything else.
        link: of the link inside a node, by collectives.
        network: of the network between nodes, by collectives.
    """

    matmul: float = 0.75
    low_matmul: float = 0.55
    half_rows: float = 400.0
    attention: float = 0.35
    scores: float = 0.8
    bandwidth: float = 0.7
    link: float = 0.6
    network: float = 0.7


# Fitted to published runs; docs/planner.md says to which.
_AMPERE = Efficiency(0.74, half_rows=316, attention=0.32, scores=0.95, bandwidth=0.7, link=0.95, network=0.78)
_HOPPER = Efficiency(0.635, half_rows=197, attention=0.12, scores=0.95, bandwidth=0.75, link=0.93, network=0.22)
_VOLTA = Efficiency(0.78, half_rows=356, attention=0.32, scores=0.95, bandwidth=0.7, link=0.49, network=0.66)
BY_ARCHITECTURE = {"V100": _VOLTA, "A100": _AMPERE, "A800": _AMPERE, "H100": _HOPPER, "H200": _HOPPER, "H800": _HOPPER}


def efficiency_of(device: DeviceKind) -> Efficiency:
    """What is known of the device's architecture, else what holds for most."""
    return next((found for name, found in BY_ARCHITECTURE.items() if device.name.startswith(name)), Efficiency())


def matmul_seconds(flop: float, *, rows: float, peak: float, share: float, half_rows: float) -> float:
    """Seconds of a matrix product: fewer rows than the device can fill itself with are slower.

    The rate is peak x share x rows / (rows + half_rows), which tiles and waves of tiles follow on average.
    """
    return flop / (peak * share) * (1 + half_rows / rows)
