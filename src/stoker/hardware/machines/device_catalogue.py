"""Kinds of devices: their arithmetic rates, memory and links, by name.

Figures are those of the makers' datasheets, named beside each. Arithmetic is dense: a figure "with sparsity" is halved.
Links are one way: a datasheet's NVLink figure counts both. Memory is as the driver reports it to a program, which is
less than the nominal size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stoker.errors import Problem, UserError

# Arithmetic that a device lacks is done in the next wider one that it has.
WIDER = {"fp4": "fp8", "fp8": "fp16", "bf16": "fp32", "fp16": "fp32", "tf32": "fp32"}


@dataclass(frozen=True)
class DeviceKind:
    """The peak figures of a kind of device.

    Attributes:
        name: such as ``A100-80GB-SXM``.
        memory_gib: GiB that a program may allocate in all, context included.
        memory_gbs: GB/s between memory and processor.
        peak_tflops: TFLOP/s of matrix products by precision (fp32, tf32, fp16, bf16, fp8, fp4), dense, with
            accumulation in fp32.
        link_gbs: GB/s, one way, from one device to all others of its node together.
        link: the kind of that link.
        host_gbs: GB/s, one way, to the host's memory.
        source: where the figures are from.
        power: its board's power limit relative to that of the chip's fastest board; fewer watts are a lower clock.
        like: the catalogue's device that the figures are derived from, where a name states others.
    """

    name: str
    memory_gib: float
    memory_gbs: float
    peak_tflops: Mapping[str, float] = field(hash=False)
    link_gbs: float
    link: str
    host_gbs: float
    source: str = ""
    power: float = 1.0
    like: str = ""

    @property
    def is_cpu(self) -> bool:
        """Returns whether it computes in the host's own memory."""
        return self.link == HOST

    @property
    def is_nvidia(self) -> bool:
        """Returns whether it is a GPU of NVIDIA's."""
        return not self.is_cpu and not (self.like or self.name).startswith(AMD)

    @property
    def has_flash(self) -> bool:
        """Returns whether torch's flash attention runs on it: on NVIDIA's GPUs since Ampere."""
        return self.is_nvidia and "bf16" in self.peak_tflops

    def peak(self, precision: str) -> float:
        """Returns the FLOP/s of matrix products; in the next wider precision if the device has no units for this one.

        Raises:
            UserError: there is no such precision.
        """
        if precision not in ("fp32", *WIDER):
            raise UserError(Problem(f"`{precision}` is not a precision", f"write one of fp32, {', '.join(WIDER)}"))
        while precision not in self.peak_tflops:
            precision = WIDER[precision]
        return self.peak_tflops[precision] * 1e12


AMD = "MI"  # how names of its devices begin
NVLINK, FABRIC, HOST = "NVLink", "Infinity Fabric", "memory"
# One way over 16 lanes, by generation; the rate after encoding is about 2% less.
PCIE3, PCIE4, PCIE5, PCIE6 = 16.0, 32.0, 64.0, 128.0

_VOLTA = "NVIDIA V100 datasheet (2020-01)"
_AMPERE = "NVIDIA A100 datasheet (2021-06)"
_HOPPER = "NVIDIA H100 datasheet (2023)"
_BLACKWELL = "NVIDIA HGX platform page and Blackwell datasheet (2025): an eighth of the board"
_RACK = "NVIDIA GB200 and GB300 NVL72 pages (2025): a 72nd of the rack; half of a Grace processor's link"
_A100 = {"fp32": 19.5, "tf32": 156, "fp16": 312, "bf16": 312}
_H100 = {"fp32": 67, "tf32": 494.7, "fp16": 989.4, "bf16": 989.4, "fp8": 1978.9}
_B200 = {"fp32": 75, "tf32": 1125, "fp16": 2250, "bf16": 2250, "fp8": 4500}
_GB200 = {"fp32": 80, "tf32": 1250, "fp16": 2500, "bf16": 2500, "fp8": 5000}


def _half(tflops: float, **others: float) -> dict[str, float]:
    """Returns a device whose fp16 and bf16 are equally fast."""
    return {"fp16": tflops, "bf16": tflops, **others}


# The first word alone means the first device that begins with it.
# fmt: off
CATALOGUE = (
    DeviceKind("V100-16GB-SXM2", 15.77, 900, {"fp32": 15.7, "fp16": 125}, 150, NVLINK, PCIE3, _VOLTA),
    DeviceKind("V100-32GB-SXM2", 31.74, 900, {"fp32": 15.7, "fp16": 125}, 150, NVLINK, PCIE3, _VOLTA),
    DeviceKind("V100-16GB-PCIe", 15.77, 900, {"fp32": 14, "fp16": 112}, PCIE3, "PCIe", PCIE3, _VOLTA),
    DeviceKind("V100-32GB-PCIe", 31.74, 900, {"fp32": 14, "fp16": 112}, PCIE3, "PCIe", PCIE3, _VOLTA),
    DeviceKind("A100-80GB-SXM", 79.2, 2039, _A100, 300, NVLINK, PCIE4, _AMPERE),
    DeviceKind("A100-40GB-SXM", 39.4, 1555, _A100, 300, NVLINK, PCIE4, _AMPERE),
    DeviceKind("A100-80GB-PCIe", 79.2, 1935, _A100, PCIE4, "PCIe", PCIE4, _AMPERE),
    DeviceKind("A100-40GB-PCIe", 39.4, 1555, _A100, PCIE4, "PCIe", PCIE4, _AMPERE),
    DeviceKind("A800-80GB-SXM", 79.3, 2039, _A100, 200, NVLINK, PCIE4, "NVIDIA A800 datasheet: A100, fewer links"),
    DeviceKind("H100-80GB-SXM", 79.1, 3350, _H100, 450, NVLINK, PCIE5, _HOPPER),
    DeviceKind("H100-80GB-PCIe", 79.1, 2000, _half(756, fp32=51, tf32=378, fp8=1513), PCIE5, "PCIe", PCIE5, _HOPPER),
    DeviceKind("H100-94GB-NVL", 93.1, 3938, _half(835, fp32=60, tf32=417.5, fp8=1670), PCIE5, "PCIe", PCIE5,
               "NVIDIA H100 NVL product brief; its bridge joins two cards only"),
    DeviceKind("H100-96GB-SXM", 95.0, 2400, _H100, 450, NVLINK, PCIE5,
               "torchtitan performance notes: 500 W, HBM2e, peak as SXM; bandwidth derived from six HBM2e stacks",
               power=500 / 700),
    DeviceKind("H200-141GB-SXM", 139.8, 4800, _H100, 450, NVLINK, PCIE5, "NVIDIA H200 datasheet (2024)"),
    DeviceKind("GH200-96GB", 94.5, 4000, _H100, 450, NVLINK, 450,
               "NVIDIA GH200 datasheet (2023): NVLink-C2C to the host"),
    DeviceKind("H800-80GB-SXM", 79.1, 3350, _H100, 200, NVLINK, PCIE5, "NVIDIA H800 datasheet: H100, fewer links"),
    DeviceKind("H20-96GB-SXM", 95.0, 4000, _half(148, fp32=44, tf32=74, fp8=296), 450, NVLINK, PCIE5,
               "NVIDIA H20 product sheet (2023)"),
    DeviceKind("B200-180GB-SXM", 178.35, 8000, {**_B200, "fp4": 9000}, 900, NVLINK, PCIE5, _BLACKWELL),
    DeviceKind("B300-270GB-SXM", 267.7, 8000, {**_B200, "fp4": 13500}, 900, NVLINK, PCIE6, _BLACKWELL),
    DeviceKind("GB200-186GB", 184.3, 8000, {**_GB200, "fp4": 10000}, 900, NVLINK, 225, _RACK),
    DeviceKind("GB300-279GB", 276.6, 8000, {**_GB200, "fp4": 15000}, 900, NVLINK, 225, _RACK),
    DeviceKind("MI250X-64GB-GCD", 63.98, 1638, _half(191.5, fp32=47.9), 100, FABRIC, PCIE4,
               "AMD MI250X datasheet: one of the two dies of a module; the link is two of 50 GB/s to other modules"),
    DeviceKind("MI250-64GB-GCD", 63.98, 1638, _half(181, fp32=45.3), 100, FABRIC, PCIE4,
               "AMD MI250 datasheet: one of the two dies of a module"),
    DeviceKind("MI300A-128GB", 127.8, 5300, _half(980.6, fp32=122.6, tf32=490.3, fp8=1961.2), 384, FABRIC, PCIE5,
               "AMD MI300A datasheet (2023)"),
    DeviceKind("MI300X-192GB", 191.7, 5300, _half(1307.4, fp32=163.4, tf32=653.7, fp8=2614.9), 448, FABRIC, PCIE5,
               "AMD MI300X datasheet (2023): seven links of 64 GB/s"),
    DeviceKind("MI325X-256GB", 255.7, 6000, _half(1307.4, fp32=163.4, tf32=653.7, fp8=2614.9), 448, FABRIC, PCIE5,
               "AMD MI325X datasheet (2024)"),
    DeviceKind("MI350X-288GB", 287.6, 8000, _half(2306.9, fp32=144.2, fp8=4613.7, fp4=9227.5), 537.6, FABRIC, PCIE5,
               "AMD MI350X datasheet (2025)"),
    DeviceKind("MI355X-288GB", 287.6, 8000, _half(2516.6, fp32=157.3, fp8=5033.2, fp4=10066.3), 537.6, FABRIC, PCIE5,
               "AMD MI355X datasheet (2025): seven links of 76.8 GB/s"),
    DeviceKind("RTX3090-24GB", 23.7, 936, _half(71, fp32=35.6, tf32=35.6), PCIE4, "PCIe", PCIE4,
               "NVIDIA GA102 whitepaper"),
    DeviceKind("RTX4090-24GB", 23.65, 1008, _half(165.2, fp32=82.6, tf32=82.6, fp8=330.3), PCIE4, "PCIe", PCIE4,
               "NVIDIA Ada whitepaper"),
    DeviceKind("A6000-48GB", 47.5, 768, _half(154.8, fp32=38.7, tf32=77.4), PCIE4, "PCIe", PCIE4,
               "NVIDIA RTX A6000 datasheet; its bridge joins two cards only"),
    DeviceKind("L40S-48GB", 44.5, 864, _half(362, fp32=91.6, tf32=183, fp8=733), PCIE4, "PCIe", PCIE4,
               "NVIDIA L40S datasheet"),
    DeviceKind("A10G-24GB", 22.1, 600, _half(70, fp32=31.5, tf32=35), PCIE4, "PCIe", PCIE4,
               "NVIDIA A10G datasheet, as AWS publishes it"),
    DeviceKind("T4-16GB", 14.75, 320, {"fp32": 8.1, "fp16": 65}, PCIE3, "PCIe", PCIE3, "NVIDIA T4 datasheet"),
    DeviceKind("L4-24GB", 22.1, 300, _half(121, fp32=30.3, tf32=60, fp8=242.5), PCIE4, "PCIe", PCIE4,
               "NVIDIA L4 datasheet"),
    DeviceKind("TPUv4-32GB", 32.0, 1228, _half(275, fp32=68.75), 300, "ICI", PCIE3,
               "Jouppi et al., 2023, table 4; fp16 taken as bf16, fp32 as a quarter of it"),
    # A process of a server processor with AVX-512: an order of magnitude, until this machine is measured.
    DeviceKind("CPU", 64.0, 50, _half(0.5, fp32=0.5), 2, HOST, 50, "assumed; `stoker plan --calibrate` measures"),
)
# fmt: on
