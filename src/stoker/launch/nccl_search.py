"""Searches the settings of NCCL that make the collectives of this machine's GPUs faster.

NCCL reads its settings from environment variables when it starts, so each candidate is measured in new processes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist

from stoker.errors import UserError
from stoker.hardware.host_facts import HostFacts
from stoker.hardware.machines.device_catalogue import NVLINK
from stoker.hardware.machines.device_names import device_kind
from stoker.hardware.measured.calibrate import time_collectives
from stoker.hardware.measured.calibration import Curve
from stoker.hardware.measured.nccl_settings import NcclSettings, nccl_host
from stoker.launch.process_pool import Pool

Setting = tuple[str, str]
Measure = Callable[[Mapping[str, str], float], Sequence[Curve]]  # of environment variables and a limit in seconds

# The algorithms of all-reduce alone are chosen, where NCCL has several: the other collectives lack trees.
CANDIDATES: tuple[Setting, ...] = (
    ("NCCL_ALGO", "allreduce:Ring"),
    ("NCCL_ALGO", "allreduce:Tree"),
    ("NCCL_ALGO", "allreduce:NVLS"),
    ("NCCL_NVLS_ENABLE", "0"),
    ("NCCL_PROTO", "Simple"),
    ("NCCL_PROTO", "LL128"),
    ("NCCL_MIN_NCHANNELS", "16"),
    ("NCCL_MIN_NCHANNELS", "32"),
    ("NCCL_MAX_NCHANNELS", "8"),
    ("NCCL_MAX_NCHANNELS", "16"),
    ("NCCL_BUFFSIZE", str(2**21)),
    ("NCCL_BUFFSIZE", str(2**23)),
)
# NCCL uses this protocol by itself only over NVLink: forced elsewhere, it may corrupt data (src/graph/tuning.cc).
OVER_NVLINK = ("NCCL_PROTO", "LL128")
SIZES = (2**14, 2**22, 2**27)  # bytes: latency, a small bucket, the gradients of a block
GAIN = 0.05  # by which a setting must be faster somewhere, and must not be slower anywhere
FIRST_LIMIT = 300.0  # seconds of NCCL's own choices, with the start of the processes
LEAST_LIMIT, TIMES_FIRST = 30.0, 3  # seconds of a candidate: at least, and in addition this many times the first


def nccl_settings(facts: HostFacts, environment: Mapping[str, str], *, report: Callable[[str], None]) -> NcclSettings:
    """Returns the fastest settings for all GPUs of this machine; variables that the user has set are not searched.

    Args:
        environment: variables that the processes need on this host.
        report: called with the name of each measurement.
    """
    count, name = torch.cuda.device_count(), torch.cuda.get_device_name()
    left = [each for each in CANDIDATES if each[0] not in os.environ and (each != OVER_NVLINK or _has_nvlink(name))]
    measure = partial(measure_settings, count=count, device="cuda", environment=environment)
    variables, failed = search_settings(left, measure, report=report)
    return NcclSettings(nccl_host(facts, processes=count), variables, failed)


def search_settings(
    candidates: Sequence[Setting], measure: Measure, *, report: Callable[[str], None] = lambda _: None
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Adds one setting after another to the best so far, if it is faster twice in a row.

    Returns:
        the variables to set; the settings that failed, each with its reason.
    """
    report("NCCL's own choices")
    began = time.perf_counter()
    best: dict[str, str] = {}
    least = measure(best, FIRST_LIMIT)
    limit = LEAST_LIMIT + TIMES_FIRST * (time.perf_counter() - began)
    failed = []
    for number, (name, value) in enumerate(candidates, 1):
        report(f"NCCL setting {number} of {len(candidates)}: {name}={value}")
        changed = {**best, name: value}
        try:
            found = measure(changed, limit)
            if is_faster(found, least) and is_faster(measure(changed, limit), measure(best, limit)):
                best, least = changed, found
        except TimeoutError:
            failed.append(f"{name}={value}: it did not end within {limit:.0f} s")
        except UserError as error:
            failed.append(f"{name}={value}: {error.problems[0].message.splitlines()[0]}")
    return best, tuple(failed)


def is_faster(new: Sequence[Curve], old: Sequence[Curve]) -> bool:
    """Returns whether some collective is faster by 5 %, and none is slower by 5 %, at any size."""
    ratios = [
        now / before for a, b in zip(new, old, strict=True) for now, before in zip(a.seconds, b.seconds, strict=True)
    ]
    return min(ratios) <= 1 - GAIN and max(ratios) < 1 + GAIN


def measure_settings(
    settings: Mapping[str, str],
    limit: float,
    *,
    count: int,
    device: str,
    environment: Mapping[str, str],
    work: Callable[[str], Sequence[Curve]] | None = None,
) -> list[Curve]:
    """Returns the collectives between two and between all of ``count`` new processes with these variables.

    Args:
        limit: seconds that each of both groups gets.
        work: what each process measures, by default `timed_collectives`; called with the type of its device.

    Raises:
        TimeoutError: a process did not end in time.
        UserError: a process failed.
    """
    curves: list[Curve] = []
    with Pool(count, device=device, environment={**environment, **settings}) as pool:
        for ranks in sorted({2, count}):
            curves += pool.run(work or timed_collectives, device, world=ranks, timeout=limit, wait=2 * limit)[0]
    return curves


def timed_collectives(device_type: str, sizes: Sequence[int] = SIZES) -> tuple[Curve, ...]:
    """Checks and measures the collectives of this process' group.

    Raises:
        ArithmeticError: they give wrong values.
    """
    device = torch.device(device_type, dist.get_rank()) if device_type == "cuda" else torch.device(device_type)
    for size in sizes:
        _check_values(size // 4, device)
    return time_collectives(sizes, device=device)


def _check_values(numbers: int, device: torch.device) -> None:
    """Gathers, scatters and sums the numbers 1, 2, ... of the ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    part = torch.full((max(1, numbers // ranks),), rank + 1.0, device=device)
    right = torch.arange(1.0, ranks + 1, device=device).repeat_interleave(len(part))
    whole = torch.empty_like(right)
    dist.all_gather_into_tensor(whole, part)
    gathered = torch.equal(whole, right)
    dist.reduce_scatter_tensor(part, right)
    scattered = bool((part == ranks * (rank + 1)).all())
    dist.all_reduce(whole)
    if not (gathered and scattered and torch.equal(whole, ranks * right)):
        raise ArithmeticError("the collectives give wrong values")


def _has_nvlink(name: str) -> bool:
    try:
        return device_kind(name).link == NVLINK
    except UserError:
        return False
