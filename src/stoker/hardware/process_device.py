"""The device of a process and its precision."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor, dtype

from stoker.errors import CannotRun, Problem
from stoker.hardware.host_facts import pci_address
from stoker.hardware.processor import has_bf16_matrix_units, processor_name


@dataclass(frozen=True)
class Device:
    """The device of this process and the arithmetic chosen for it.

    Attributes:
        type: ``cuda``, ``mps`` or ``cpu``.
        precision: ``bf16``, ``fp16`` or ``fp32``.
        why: the reason for the precision.
        index: which of several; None for the process' current one.
    """

    type: str
    precision: str
    why: str
    index: int | None = None

    @property
    def torch(self) -> torch.device:
        return torch.device(self.type) if self.index is None else torch.device(self.type, self.index)

    @cached_property
    def name(self) -> str:
        """The name that the maker gave it."""
        return torch.cuda.get_device_name(self.index) if self.type == "cuda" else processor_name()

    @property
    def autocast_dtype(self) -> dtype | None:
        """The type of matrix products under autocast; None without autocast."""
        return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.precision)

    def autocast(self) -> AbstractContextManager[object]:
        """Returns a context of matrix products in the chosen precision; without effect in float32."""
        dtype = self.autocast_dtype
        return torch.autocast(self.type, dtype) if dtype is not None else nullcontext()

    def peak_memory(self) -> float:
        """GiB: the largest allocation so far on a GPU, the largest resident size of the process on a CPU."""
        if self.type == "cuda":
            return torch.cuda.max_memory_allocated() / 2**30
        return peak_resident()

    def synchronise(self) -> None:
        """Waits until the device has finished its queued work; only for measuring."""
        if self.type == "cuda":
            torch.cuda.synchronize()


def peak_resident() -> float:
    """GiB: the largest resident size that this process has had."""
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 2**20
    return psutil.Process(os.getpid()).memory_info().rss / 2**30


def choose_device(precision: str = "auto", on: torch.device | None = None) -> Device:
    """Returns this process' device and precision; ``auto`` takes the fastest that trains without special care.

    bfloat16 needs hardware for it: on a processor without, it is about 20 times slower than float32.

    Args:
        on: the device; by default the best one.
    """
    on = on or torch.device(best_kind())
    chosen, why = (precision, "given") if precision != "auto" else _precision_of(on.type)
    return Device(on.type, chosen, why, on.index)


def open_device(device: torch.device) -> None:
    """Makes a GPU the current one of this process, and initialises it; does nothing for other devices.

    Rows and chunks differ in size from step to step: expandable segments fragment less than blocks of fixed
    sizes. The reproducible products of cuBLAS need a workspace of a fixed size. Variables that the user set are kept.
    """
    if device.type != "cuda":
        return
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.cuda.set_device(device)
    torch.cuda.init()


def device_address(device: torch.device) -> str:
    """Returns the PCI address of an NVIDIA GPU; empty for other devices, and where torch does not state it."""
    if not is_nvidia(device):
        return ""
    facts: Any = torch.cuda.get_device_properties(device)
    if not hasattr(facts, "pci_bus_id"):
        return ""
    return pci_address(facts.pci_domain_id, facts.pci_bus_id, facts.pci_device_id)


def best_kind() -> str:
    """``cuda``, ``mps`` or ``cpu``."""
    return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"


def _precision_of(kind: str) -> tuple[str, str]:
    if kind == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return "bf16", "this GPU computes in bfloat16"
    if kind == "cuda":
        return "fp16", "this GPU has no bfloat16, so float16 with loss scaling"
    if kind == "cpu" and has_bf16_matrix_units():
        return "bf16", "this processor has matrix units for bfloat16 (AMX)"
    return "fp32", "this processor has no fast bfloat16" if kind == "cpu" else "the safe choice here"


def is_nvidia(device: torch.device) -> bool:
    """Returns whether a device is a GPU of NVIDIA's: torch calls AMD's ``cuda`` too."""
    return device.type == "cuda" and torch.version.hip is None


def widest_float(device: torch.device) -> dtype:
    """Returns float64; float32 on Apple's GPUs, which have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def move_to(tensor: Tensor, device: torch.device, *, non_blocking: bool = False) -> Tensor:
    """Returns a tensor on a device, in `widest_float` at most."""
    held = widest_float(device) if tensor.dtype == torch.float64 else tensor.dtype
    return tensor.to(held).to(device, non_blocking=non_blocking)


def on_device(values: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """Returns a copy of values on the host; the host does not wait for it."""
    tensor = torch.as_tensor(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def check_devices(devices: Sequence[int] | None, processes: int) -> None:
    """Checks that this machine has a device for each of its processes.

    Args:
        devices: the numbers of the requested GPUs.

    Raises:
        CannotRun: it does not.
    """
    count = torch.cuda.device_count()
    if devices is not None and max(devices) >= count:
        here = f"has {count} GPUs, numbered from 0" if count else "has no GPU"
        raise CannotRun(Problem(f"parallel.devices: {max(devices)} is requested, and this machine {here}"))
    if count and devices is None and processes > count:
        raise CannotRun(
            Problem(
                f"the layout needs {processes} processes with a GPU each, and this machine has {count}",
                "lower `parallel`, or start the processes on several machines with torchrun or srun",
            )
        )


def device_of(number: int, devices: Sequence[int] | None = None, *, alone: bool = False) -> torch.device:
    """Returns the device of one of several processes on this machine.

    Args:
        number: of the device, counted from 0; see `stoker.launch.cluster_env.RankInfo.device_number`.
        devices: numbers of the processes' GPUs, in order; by default the first ones.
        alone: whether it is the only process: Apple's GPU supports only one.
    """
    if not torch.cuda.is_available():
        return torch.device(best_kind() if alone else "cpu")
    if devices is not None:
        return torch.device("cuda", devices[number])
    # A launcher may let each process see its own GPU only.
    return torch.device("cuda", number if torch.cuda.device_count() > 1 else 0)
