"""Measures this machine: matrix products, attention, memory, host copies, calls, collectives."""

from __future__ import annotations

import platform
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from functools import partial
from itertools import cycle, product

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from stoker.hardware.measured.calibration import HEAD_SIZES, Calibration, Curve, MatmulTable
from stoker.hardware.process_device import Device, choose_device
from stoker.hardware.processor import available_cores

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SIZES = {"cpu": (16, 64, 256, 1024, 4096), "cuda": (16, 128, 512, 2048, 8192)}
# Bytes of a tensor, from sizes that fit a cache to sizes that do not.
TENSORS = {"cpu": (2**14, 2**18, 2**21, 2**24, 2**27), "cuda": (2**18, 2**22, 2**26, 2**30)}
MESSAGES = (2**10, 2**14, 2**18, 2**22, 2**26)  # bytes of the whole tensor
ROWS = {"cpu": (64, 256, 512, 1024, 2048), "cuda": (256, 1024, 4096, 8192)}  # tokens that attend to each other
HEADS = {"cpu": 8, "cuda": 32}
# As rows of documents of any lengths are computed. torch may prefer cuDNN's kernel, which is faster and not for those.
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
AT_ONCE = 10  # tensors in memory while operators are measured, and room for others
FOR_MATRICES, FOR_ATTENTION = 0.6, 0.15  # of the time; memory has the rest
RING, MOST_OPERANDS = 2**28, 64  # bytes that operands rotate over, as in a step, so that caches do not hold them
LEAST, MOST = 3, 1000  # minimum and maximum repetitions of one measurement
REPETITIONS = 10  # of a collective
BATCH, BATCH_SECONDS = 50, 2e-3  # calls on a GPU between two waits, and seconds


def calibrate(
    seconds: float = 60.0,
    *,
    device: Device | None = None,
    threads: int | None = None,
    sizes: Sequence[int] | None = None,
    tensors: Sequence[int] | None = None,
) -> Calibration:
    """Measures the device of this process in about ``seconds``; stores nothing (see `Calibration.save`).

    Args:
        device: by default the best available.
        threads: of a CPU's operators; by default all cores that this process may use.
        sizes: of the matrices, each of m, n and k takes each; those too large for the time are left out.
        tensors: bytes of the tensors that memory is measured with.
    """
    device = device or choose_device()
    kind = "cuda" if device.type == "cuda" else "cpu"
    with _threads(threads):
        precisions = _precisions(device)
        chosen = _affordable(sizes or SIZES[kind], seconds * FOR_MATRICES / len(precisions), device)
        share = seconds * FOR_MATRICES / (len(precisions) * len(chosen) ** 3)
        matmuls = tuple(_matmuls(precision, chosen, share, device) for precision in precisions)
        used = tensors or TENSORS[kind]
        if device.type == "cuda":
            used = tensors_that_fit(used, torch.cuda.mem_get_info(device.torch)[0])
        curves = _memory(used, seconds * (1 - FOR_MATRICES - FOR_ATTENTION), device)
        curves += _attention(ROWS[kind], seconds * FOR_ATTENTION, device) + _calls(device)
        return Calibration(
            date=date.today().isoformat(),
            machine=platform.node(),
            device=device.name,
            threads=torch.get_num_threads() if device.type == "cpu" else 0,
            torch=str(torch.__version__),
            matmuls=matmuls,
            curves=curves,
            launch_s=_launch(device),
        )


def tensors_that_fit(sizes: Sequence[int], free: int) -> tuple[int, ...]:
    """Returns the sizes, in bytes, that a device with this number of free bytes can be measured with."""
    return tuple(size for size in sizes if size * AT_ONCE <= free)


def seconds_of(work: Callable[[], object], budget: float, device: Device) -> float:
    """Seconds of a call, after one that is not counted; at least three, more while the budget lasts.

    The fastest call counts, since other load only adds time. A single CPU thread is timed by its own processor time,
    which other load does not add to: there the median counts.
    """

    alone = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if alone else time.perf_counter

    def once(calls: int) -> float:
        begin = clock()
        for _ in range(calls):
            work()
        device.synchronise()
        return (clock() - begin) / calls

    # Short calls are queued on a GPU, which works on one while the next is issued.
    first = once(1)
    calls = max(1, min(BATCH, int(BATCH_SECONDS / first))) if device.type == "cuda" else 1
    taken: list[float] = []
    started = time.perf_counter()
    while len(taken) < LEAST or (len(taken) < MOST and time.perf_counter() - started < budget):
        taken.append(once(calls))
    return statistics.median(taken) if alone else min(taken)


def time_collectives(
    sizes: Sequence[int] = MESSAGES, *, group: dist.ProcessGroup | None = None, device: torch.device | None = None
) -> tuple[Curve, ...]:
    """Measures each kind of collective between the processes of a group; a collective.

    A time is that of the slowest rank. ``send`` is from one rank to the next, all at once.

    Args:
        sizes: bytes of the whole tensor.
        device: of the tensors; by default the host's memory.

    Returns:
        The same on every rank.
    """
    ranks = dist.get_world_size(group)
    device = device or torch.device("cpu")
    curves: dict[str, list[float]] = {}
    used = sorted({max(ranks, size // 4 // ranks * ranks) for size in sizes})  # numbers, which divide evenly
    for count in used:
        for kind, work in _collectives(count, ranks, group, device):
            curves.setdefault(kind, []).append(_slowest(work, group, device))
    return tuple(Curve(kind, tuple(4 * count for count in used), tuple(times), ranks) for kind, times in curves.items())


def _precisions(device: Device) -> tuple[str, ...]:
    """Returns fp32, and the device's training precisions; emulated bfloat16 on a CPU would take minutes."""
    if device.type == "cuda":
        return ("fp32", "tf32", "bf16", "fp16") if device.precision == "bf16" else ("fp32", "fp16")
    return ("fp32",) if device.precision == "fp32" else ("fp32", device.precision)


@contextmanager
def _threads(threads: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads or min(before, available_cores()))
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _tf32(on: bool) -> Iterator[None]:
    """Products of float32 in TensorFloat-32, or exactly."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if on else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _affordable(sizes: Sequence[int], budget: float, device: Device) -> tuple[int, ...]:
    """Returns the sizes whose products, each done as often as it must be, take no longer than the budget."""
    sizes = sorted(sizes)
    probe = sizes[min(2, len(sizes) - 1)]
    square = torch.randn(probe, probe, device=device.torch)
    rate = 2 * probe**3 / seconds_of(lambda: F.linear(square, square), 0.0, device)
    while len(sizes) > 2 and 2 * sum(sizes) ** 3 * (LEAST + 1) / rate > budget:
        sizes = sizes[:-1]
    return tuple(sizes)


def _matmuls(precision: str, sizes: tuple[int, ...], budget: float, device: Device) -> MatmulTable:
    """Activations (m, k) times a weight (n, k), as a linear layer has them."""
    numbers = torch.randn(2, sizes[-1] ** 2, device=device.torch).to(DTYPES[precision])
    times = []
    with _tf32(precision == "tf32"), torch.no_grad():
        for m, n, k in product(sizes, repeat=3):
            left, right = numbers[0, : m * k].view(m, k), numbers[1, : n * k].view(n, k)
            times.append(seconds_of(partial(F.linear, left, right), budget, device))
    return MatmulTable(precision, sizes, tuple(times))


def _memory(tensors: Sequence[int], budget: float, device: Device) -> tuple[Curve, ...]:
    """Traffic by kind: a size counts every byte that is read or written."""
    times: dict[str, list[tuple[int, float]]] = {}
    for size in tensors:
        one, two, out = (torch.ones(size // 4, device=device.torch) for _ in range(3))
        work: dict[str, tuple[int, Callable[[], object]]] = {
            "read": (1, one.sum),
            "write": (1, partial(out.fill_, 0.0)),
            "copy": (2, partial(out.copy_, one)),
            "add": (3, partial(torch.add, one, two, out=out)),
            "silu": (2, partial(F.silu, one)),
            "multiply": (4, _rotating(one, two)),
            "dropout": (4, partial(F.dropout, one, 0.1)),
        }
        if device.type == "cuda":
            host = torch.ones(size // 4).pin_memory()
            work["to-device"] = 1, partial(out.copy_, host, non_blocking=True)
            work["to-host"] = 1, partial(host.copy_, out, non_blocking=True)
        share = budget / (len(tensors) * len(work))
        for kind, (passes, call) in work.items():
            times.setdefault(kind, []).append((passes * size, seconds_of(call, share, device)))
    return tuple(
        Curve(kind, tuple(size for size, _ in points), tuple(taken for _, taken in points))
        for kind, points in times.items()
    )


def _rotating(one: torch.Tensor, two: torch.Tensor) -> Callable[[], object]:
    """Products of operands that were used some time ago, into new memory, as eager code computes them."""
    count = max(1, min(MOST_OPERANDS, RING // (3 * one.nbytes)))
    operands = cycle([(one.clone(), two.clone()) for _ in range(count)])
    results: deque[torch.Tensor] = deque(maxlen=count)
    return lambda: results.append(torch.mul(*next(operands)))


def _attention(rows: Sequence[int], budget: float, device: Device) -> tuple[Curve, ...]:
    """Measures seconds of causal attention of one head over these row lengths, forward and backward, by head size."""
    dtype = device.autocast_dtype or torch.float32
    heads = HEADS["cuda" if device.type == "cuda" else "cpu"]
    share = budget / (2 * len(HEAD_SIZES) * len(rows))
    curves = []
    for head_size in HEAD_SIZES:
        forward, backward = [], []
        for tokens in rows:
            shape = (3, 1, heads, tokens, head_size)
            q, k, v = torch.randn(shape, device=device.torch, dtype=dtype, requires_grad=True).unbind()
            attend = partial(_attended, q, k, v)
            result = attend()
            back = partial(torch.autograd.grad, result, (q, k, v), torch.ones_like(result), retain_graph=True)
            forward.append(seconds_of(attend, share, device) / heads)
            backward.append(seconds_of(back, share, device) / heads)
        for kind, times in (("attention", forward), ("attention-backward", backward)):
            curves.append(Curve(f"{kind}-{head_size}", tuple(rows), tuple(times)))
    return tuple(curves)


def _attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(KERNELS):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _calls(device: Device, calls: int = 300) -> tuple[Curve, ...]:
    """Seconds of an operator on 16 numbers that autograd records, and of its backward pass."""
    number = torch.zeros(16, device=device.torch, requires_grad=True)

    def forward() -> torch.Tensor:
        passed = number
        for _ in range(calls):
            passed = passed * 1.0
        return passed

    chain = forward()
    back = partial(torch.autograd.grad, chain, number, torch.ones_like(chain), retain_graph=True)
    return tuple(
        Curve(kind, (chain.nbytes,), (seconds_of(work, 0.0, device) / calls,))
        for kind, work in (("forward", forward), ("backward", back))
    )


def _launch(device: Device, calls: int = 1000) -> float:
    """Measures seconds of one call of an operator on 16 numbers: the launch cost of each small operator of a step."""
    number = torch.zeros(16, device=device.torch)

    def many() -> None:
        for _ in range(calls):
            number.add_(1.0)

    return seconds_of(many, 0.0, device) / calls


def _collectives(
    count: int, ranks: int, group: dist.ProcessGroup | None, device: torch.device
) -> Iterator[tuple[str, Callable[[], object]]]:
    whole = torch.ones(count, device=device)
    part, other = torch.ones(count // ranks, device=device), torch.ones(count, device=device)
    yield "all-reduce", lambda: dist.all_reduce(whole, group=group)
    yield "all-gather", lambda: dist.all_gather_into_tensor(whole, part, group=group)
    yield "reduce-scatter", lambda: dist.reduce_scatter_tensor(part, whole, group=group)
    yield "all-to-all", lambda: dist.all_to_all_single(other, whole, group=group)
    if ranks > 1:
        me = dist.get_rank(group)
        after, before = ((me + step) % ranks for step in (1, -1))

        def send() -> None:
            calls = [
                dist.P2POp(dist.isend, whole, group=group, group_peer=after),
                dist.P2POp(dist.irecv, other, group=group, group_peer=before),
            ]
            for request in dist.batch_isend_irecv(calls):
                request.wait()

        yield "send", send


def _slowest(work: Callable[[], object], group: dist.ProcessGroup | None, device: torch.device) -> float:
    """Median seconds on the slowest rank; every rank repeats it equally often, or they would wait for each other."""
    taken = torch.tensor([_median(work, device)], dtype=torch.float64, device=device)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX, group=group)
    return float(taken)


def _median(work: Callable[[], object], device: torch.device) -> float:
    def once() -> float:
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begin

    once()
    return statistics.median(once() for _ in range(REPETITIONS))
