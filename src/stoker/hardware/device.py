"""Which device a process trains on, and in which arithmetic."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import psutil
import torch
from torch import dtype


@dataclass(frozen=True)
class Device:
    """The device of this process and the arithmetic chosen for it.

    Attributes:
        type: ``cuda``, ``mps`` or ``cpu``.
        precision: ``bf16``, ``fp16`` or ``fp32``.
        why: the reason for the precision.
    """

    type: str
    precision: str
    why: str

    @property
    def torch(self) -> torch.device:
        return torch.device(self.type)

    @cached_property
    def name(self) -> str:
        """The name that the maker gave it."""
        return torch.cuda.get_device_name() if self.type == "cuda" else processor_name()

    @property
    def autocast_dtype(self) -> dtype | None:
        """The type of matrix products under autocast; None without autocast."""
        return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.precision)

    def autocast(self) -> AbstractContextManager[object]:
        """Matrix products in the chosen precision; nothing in float32."""
        dtype = self.autocast_dtype
        return torch.autocast(self.type, dtype) if dtype is not None else nullcontext()

    def reset_peak(self) -> None:
        """Starts the measurement of `peak_memory` anew, where the device can."""
        if self.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def peak_memory(self) -> float:
        """GiB: the largest allocation so far on a GPU, the largest resident size of the process on a CPU."""
        if self.type == "cuda":
            return torch.cuda.max_memory_allocated() / 2**30
        return peak_resident()

    def synchronise(self) -> None:
        """Waits until the device has done what it was given; only for measuring."""
        if self.type == "cuda":
            torch.cuda.synchronize()


def processor_name() -> str:
    """The processor's name as the system tells it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return "CPU"


def peak_resident() -> float:
    """GiB: the largest resident size that this process has had."""
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 2**20
    return psutil.Process(os.getpid()).memory_info().rss / 2**30


def choose_device(precision: str = "auto") -> Device:
    """The device of this process and its precision; ``auto`` takes the fastest that trains without care.

    bfloat16 needs hardware for it: on a processor without, it is about 20 times slower than float32.
    """
    kind = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if precision != "auto":
        return Device(kind, precision, "given")
    if kind == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return Device(kind, "bf16", "this GPU computes in bfloat16")
    if kind == "cuda":
        return Device(kind, "fp16", "this GPU has no bfloat16, so float16 with loss scaling")
    if kind == "cpu" and has_bf16_matrix_units():
        return Device(kind, "bf16", "this processor has matrix units for bfloat16 (AMX)")
    return Device(kind, "fp32", "this processor has no fast bfloat16" if kind == "cpu" else "the safe choice here")


def has_bf16_matrix_units() -> bool:
    """Whether the processor multiplies bfloat16 matrices in hardware."""
    info = Path("/proc/cpuinfo")
    return info.is_file() and "amx_bf16" in info.read_text()
