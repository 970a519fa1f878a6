"""The processor of this machine, the cores that this process may use, and whether there is a CUDA driver."""

from __future__ import annotations

import os
from pathlib import Path

from stoker.hardware.host_facts import control_group_limits


def available_cores() -> int:
    """Cores this process may use, as its affinity and its control group allow."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    _, limit = control_group_limits()
    return cores if limit is None else min(cores, max(1, int(limit)))


def processor_name() -> str:
    """Returns the processor's name from the system."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return "CPU"


def has_bf16_matrix_units() -> bool:
    """Returns whether the processor multiplies bfloat16 matrices in hardware."""
    info = Path("/proc/cpuinfo")
    return info.is_file() and "amx_bf16" in info.read_text()


def has_cuda_driver() -> bool:
    """Returns whether a driver of NVIDIA's or AMD's GPUs, which torch both calls CUDA, is loaded; does not call it."""
    return has_nvidia_driver() or Path("/dev/kfd").exists()


def has_nvidia_driver() -> bool:
    """Returns whether a driver of NVIDIA's GPUs is loaded; does not call it."""
    return any(Path(name).exists() for name in ("/proc/driver/nvidia/version", "/dev/nvidiactl"))
