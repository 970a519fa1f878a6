"""Fractions of the datasheet's rates that training reaches, by device generation."""

from __future__ import annotations

from dataclasses import dataclass, replace

from stoker.hardware.machines.device_catalogue import DeviceKind


@dataclass(frozen=True)
class Efficiency:
    """Fractions of the datasheet's figures that training reaches.

    Attributes:
        matmul: of the peak, by large products in 16 bits and wider.
        low_matmul, fp4_matmul: the same in 8 and in 4 bits, whose operands must be scaled and cast.
        half_rows: tokens of a product at which it reaches half of that.
        half_width: inputs, or outputs, of a product at which it reaches half.
        attention: of the 16-bit peak, by fused attention.
        bandwidth: of the memory's, by every other operator.
        link: of the link inside a node, by collectives.
        start: of a collective, and the ramp of its rate: as many steps of a ring inside a node.
        network: of the network between nodes, by collectives, unless its kind has its own figures.
    """

    matmul: float = 0.7
    low_matmul: float = 0.55
    fp4_matmul: float = 0.40
    half_rows: float = 150.0
    half_width: float = 100.0
    attention: float = 0.35
    bandwidth: float = 0.85
    link: float = 0.7
    start: float = 4.0
    network: float = 0.58

    def matmul_share(self, precision: str) -> float:
        """Share of the peak in a precision that large products reach."""
        return {"fp8": self.low_matmul, "fp4": self.fp4_matmul}.get(precision, self.matmul)


# Fitted to published runs, which docs/planner.md lists. Blackwell Ultra may draw a sixth more power.
_AMPERE = Efficiency(0.75, half_rows=43, half_width=215, attention=0.319, link=1.0, start=16)
_HOPPER = Efficiency(0.619, low_matmul=0.672, half_rows=278, half_width=87, attention=0.336, link=0.784, start=3)
_VOLTA = Efficiency(0.705, half_rows=956, half_width=90, attention=0.363, link=0.36, start=4)
_BLACKWELL = Efficiency(
    *(0.509, 0.654, 0.508), half_rows=332, half_width=94, attention=0.373, bandwidth=0.8, link=0.695, start=50
)
_ULTRA = replace(
    _BLACKWELL,
    matmul=1.27 * _BLACKWELL.matmul,
    low_matmul=1.27 * _BLACKWELL.low_matmul,
    fp4_matmul=1.27 * _BLACKWELL.fp4_matmul,
)
# Not fitted: MI300X reaches 45 % of its peak in 16 and in 8 bits and 81 % of its bandwidth (Ambati et al., 2025), on
# Azure 44 % in fp8, 78 % of the bandwidth, a quarter of the peak in attention (ND MI300X v5 results). MI325X draws a
# third more power. MI350X reaches 44 % in fp16 (PyTorch 2.9 on ROCm 7.0: 1,022 of 2,307 TFLOP/s); MI355X may draw 40 %
# more power, at whose cube root the clock is 12 % higher. docs/planner.md compares them with runs.
_CDNA3 = Efficiency(0.47, low_matmul=0.41, half_rows=250, half_width=120, attention=0.28, bandwidth=0.78, link=0.7)
_CDNA3_COOLED = replace(_CDNA3, matmul=0.53, low_matmul=0.46)
_CDNA4 = replace(_CDNA3, matmul=0.44, low_matmul=0.38, fp4_matmul=0.28)
_CDNA4_COOLED = replace(_CDNA3, matmul=0.49, low_matmul=0.43, fp4_matmul=0.31)
_CDNA2 = replace(_CDNA3, matmul=0.6, attention=0.22)
BY_ARCHITECTURE = {
    "V100": _VOLTA, "A100": _AMPERE, "A800": _AMPERE, "H100": _HOPPER, "H200": _HOPPER, "H800": _HOPPER,
    "H20-": _HOPPER, "GH200": _HOPPER, "B200": _BLACKWELL, "GB200": _BLACKWELL, "B300": _ULTRA, "GB300": _ULTRA,
    "MI250": _CDNA2, "MI300": _CDNA3, "MI325X": _CDNA3_COOLED, "MI350X": _CDNA4, "MI355X": _CDNA4_COOLED,
}  # fmt: skip


def efficiency_of(device: DeviceKind) -> Efficiency:
    """Returns the shares of a device's architecture, or the defaults for an unknown one.

    A board that may draw less power computes at a lower clock, about the cube root of it.
    """
    found = next((found for name, found in BY_ARCHITECTURE.items() if device.name.startswith(name)), Efficiency())
    if device.power == 1:
        return found
    clock = device.power ** (1 / 3)
    shares = {name: getattr(found, name) * clock for name in ("matmul", "low_matmul", "fp4_matmul", "attention")}
    return replace(found, **shares)


def matmul_seconds(flop: float, *, rows: float, inputs: float, outputs: float, peak: float, of: Efficiency) -> float:
    """Returns the seconds of a matrix product; a product that is small in any dimension does not fill the device.

    The rate is peak / (1 + half_rows / rows + half_width / inputs + half_width / outputs), an average over tiles and
    waves of tiles.

    Args:
        rows: tokens.
        inputs, outputs: of the matrix, as one process has it.
        peak: FLOP/s that large products reach.
    """
    return flop / peak * (1 + of.half_rows / rows + of.half_width * (1 / inputs + 1 / outputs))
