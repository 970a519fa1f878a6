"""`stoker plan --calibrate`: measures this machine's devices and the collectives between its processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from stoker.hardware.host_facts import host_facts
from stoker.hardware.measured.calibrate import calibrate, time_collectives
from stoker.hardware.measured.calibration import Calibration, Curve
from stoker.hardware.process_device import choose_device, is_nvidia
from stoker.hardware.processor import available_cores
from stoker.hardware.quirks import quirks_of
from stoker.launch.nccl_search import nccl_settings
from stoker.launch.process_pool import Pool

SECONDS = 40.0  # of measuring rates, over all divisions; each rate's minimum time and the collectives double it
TIMEOUT = 300.0  # seconds that the processes get for one measurement


def measure_machine(
    seconds: float = SECONDS, *, report: Callable[[str], None] = lambda _: None
) -> tuple[Calibration, ...]:
    """Measures this machine's devices, and collectives of two and of all processes. Stores nothing.

    A processor is measured with its cores divided among 1, 2 and as many processes as there are cores, all running at
    once: they share its memory bandwidth.

    Args:
        report: called with the name of each measurement.

    Returns:
        One calibration for each number of threads of a process; one for a GPU.
    """
    if choose_device().type == "cuda":
        return _gpus(seconds, report)
    cores = available_cores()
    counts = sorted({1, 2, cores})
    found: dict[int, Calibration] = {}
    curves: list[Curve] = []
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with Pool(max(counts)) as pool:
        for count in counts:
            threads = max(1, cores // count)
            share = seconds / len(counts)
            if threads not in found:
                report(f"rates of {_processes(count)} with {threads} thread{'s' * (threads > 1)}: {share:.0f} s")
                found[threads] = pool.run(_rates, share, threads, world=count, timeout=share + TIMEOUT)[0]
            if count > 1:
                report(f"collectives between {_processes(count)}")
                curves += pool.run(time_collectives, world=count, timeout=TIMEOUT)[0]
    return tuple(calibration.with_collectives(curves) for calibration in found.values())


def _gpus(seconds: float, report: Callable[[str], None]) -> tuple[Calibration, ...]:
    """Returns the rates of the first device (the others are of the same kind), and collectives as runs have them."""
    report(f"rates of one GPU: {seconds:.0f} s")
    found = calibrate(seconds)
    count = torch.cuda.device_count()
    if count < 2:
        return (found,)
    facts = host_facts()
    quirks = quirks_of(facts, os.environ, processes=count)
    environment = {name: value for quirk in quirks for name, value in quirk.variables.items()}
    if is_nvidia(torch.device("cuda")):
        nccl = nccl_settings(facts, environment, report=report)
        found, environment = replace(found, nccl=nccl), {**environment, **nccl.variables}
    with Pool(count, device="cuda", environment=environment) as pool:
        for ranks in sorted({2, count}):
            report(f"collectives between {ranks} GPUs")
            found = found.with_collectives(pool.run(_gpu_collectives, world=ranks, timeout=TIMEOUT)[0])
    return (found,)


def _processes(count: int) -> str:
    return f"{count} process{'es' * (count > 1)}"


def _rates(seconds: float, threads: int) -> Calibration:
    return calibrate(seconds, device=choose_device(on=torch.device("cpu")), threads=threads)


def _gpu_collectives() -> tuple[Curve, ...]:
    return time_collectives(device=torch.device("cuda", dist.get_rank()))
