"""The processor and cores of this process, and its end with the process that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1  # linux/prctl.h
LOOK_EVERY = 0.5  # seconds between two looks at the parent


def available_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
    """Returns whether an NVIDIA driver is loaded; does not call CUDA."""
    return Path("/proc/driver/nvidia/version").is_file() or Path("/dev/nvidiactl").exists()


def die_with_parent() -> None:
    """Has the kernel end this process with SIGTERM when the thread that started it has ended; Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def end_with(parent: int) -> None:
    """Has this process killed when its parent, of that process id, has ended in any way."""
    if sys.platform == "linux":  # the kernel does it, also where this process hangs
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_watch, args=(parent,), daemon=True, name="parent-watch").start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_EVERY)
    os._exit(1)
