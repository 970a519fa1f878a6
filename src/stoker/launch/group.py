"""The process group of a run: which back end it talks through, and how many threads each process takes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from stoker.hardware.process import available_cores


def backend_of(device_type: str) -> str:
    """GPUs talk through NCCL, and what lies in the host's memory through gloo."""
    return "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"


@contextmanager
def process_group(
    device: torch.device, *, rank: int, world: int, store: dist.Store | None = None, timeout: float
) -> Iterator[None]:
    """Within it the processes of a run can talk to each other.

    Args:
        store: where they find each other; by default the one that MASTER_ADDR and MASTER_PORT name.
        timeout: seconds that a process waits for the others in one collective.
    """
    dist.init_process_group(
        backend_of(device.type),
        rank=rank,
        world_size=world,
        store=store,
        timeout=timedelta(seconds=timeout),
        device_id=device if device.type == "cuda" else None,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def share_cores(processes: int) -> None:
    """Gives this process its part of the machine's cores, unless OMP_NUM_THREADS says how many threads it takes."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, available_cores() // processes))
