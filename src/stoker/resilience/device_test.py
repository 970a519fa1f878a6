"""Tests that a device computes correctly and at its usual rate, in about a second before training.

Products of integers, small enough to be exact in float32 (and in TF32), are compared with the same products in another
order in float64 (Freivalds' check, 1977), which detects any wrong bit. In bfloat16, which other units of a GPU
multiply, each number of the product must be the exact one, rounded once.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import median_low

import torch
import torch.distributed as dist
from torch import Tensor

from stoker.checkpoint.object_collectives import run_on_all_ranks
from stoker.errors import UserError
from stoker.files import no_link
from stoker.hardware.measured.calibration import kept_calibration
from stoker.hardware.process_device import device_address
from stoker.hardware.processor import processor_name
from stoker.resilience.gpu_state import GpuState, gpu_state

WHOLE = 8  # integers from -8 to 8: a product of 4096 of them stays below 2^24, where float32 is exact
WIDTH = {"cpu": 384, "cuda": 4096}  # of the matrices
MEMORY = {"cpu": 32 * 2**20, "cuda": 2**30}  # bytes that are written and read back
ROUNDS = 3
SLOW = 2.0  # slowdown at which a GPU is excluded
REDUCED = 2**20  # float32 numbers
CLOCK = 5.0  # tolerated difference of the nodes' clocks, seconds: more would falsify the order of logs and events
DISK_TEST = 8 * 2**20  # bytes

Multiply = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class DeviceReport:
    """Result of the tests of one process' device and machine.

    Attributes:
        wrong: description of its errors; empty if it works.
        rate: FLOP/s of its matrix products.
        expected: rate measured earlier for such a device; None without one.
        reduce: bytes/s of an all-reduce; 0 for a single process.
        clock: seconds since 1970, at a moment shared by all processes.
        code: fingerprint of the running code.
        seconds: duration of the tests.
        gpu: what NVIDIA's driver reports about it.
    """

    rank: int
    host: str
    device: str
    is_cpu: bool
    wrong: str
    rate: float
    expected: float | None
    reduce: float
    clock: float
    code: str
    seconds: float
    gpu: GpuState = field(default_factory=GpuState)

    @property
    def where(self) -> str:
        """The device, host and rank, for messages."""
        return f"{self.device} of {self.host} (rank {self.rank})"


@dataclass(frozen=True)
class NodeFinding:
    """A fault of a device or a machine.

    Attributes:
        ranks: ranks of the processes on it.
        out: whether to exclude it from training.
    """

    ranks: tuple[int, ...]
    message: str
    out: bool


def check_device(device: torch.device, rank: int) -> DeviceReport:
    """Tests this process' device, and with several processes an all-reduce; then it is a collective."""
    begin = time.perf_counter()
    wrong = _memory_problem(device) or product_problem(device, torch.matmul)
    if has_tensor_cores(device):
        wrong = wrong or bfloat16_problem(device, torch.matmul)
    rate = _product_rate(device)
    reduce = 0.0
    if dist.is_initialized():
        problem, reduce = _reduced(device)
        wrong = wrong or problem
        dist.barrier()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()
    numbered = f"{name} {device.index}" if device.index is not None else name
    expected = _expected(device, name)
    address = device_address(device)
    gpu = gpu_state(address) if address else GpuState()
    return DeviceReport(
        rank=rank,
        host=socket.gethostname(),
        device=numbered,
        is_cpu=device.type != "cuda",
        wrong=wrong or gpu.failed,
        rate=rate,
        expected=expected,
        reduce=reduce,
        clock=time.time(),
        code=code_fingerprint(),
        seconds=time.perf_counter() - begin,
        gpu=gpu,
    )


def find_faults(reports: Sequence[DeviceReport]) -> list[NodeFinding]:
    """Returns the faults in the reports.

    A GPU is excluded if it computes wrongly or is to be replaced, or if its rate is less than half of the one measured
    for it earlier or of the others' median. A CPU's rate depends on other load and is only reported.
    """
    found = [NodeFinding((r.rank,), f"{r.where} {r.wrong}", True) for r in reports if r.wrong]
    usual = median_low(r.rate for r in reports)
    for r in reports:
        reference = r.expected or usual
        if not r.wrong and r.rate * SLOW < reference:
            words = f"multiplies matrices at {r.rate / 1e9:,.0f} GFLOP/s; expected {reference / 1e9:,.0f}"
            why = f"; {r.gpu.throttled}" if r.gpu.throttled else ""
            found.append(NodeFinding((r.rank,), f"{r.where} {words}{why}", not r.is_cpu))
        found += [NodeFinding((r.rank,), f"{r.where} {note}", False) for note in r.gpu.notes]
    clock = median_low(r.clock for r in reports)
    for r in reports:
        if abs(r.clock - clock) > CLOCK:
            found.append(NodeFinding((r.rank,), f"the clock of {r.host} is {r.clock - clock:+.0f} s off", False))
    return found


def code_differs(reports: Sequence[DeviceReport]) -> DeviceReport | None:
    """Returns the report of the first process that runs other code than rank 0."""
    return next((r for r in reports if r.code != reports[0].code), None)


def data_differs(mine: Mapping[str, str]) -> tuple[int, str] | None:
    """Returns the first rank whose data differ from rank 0's, and the name of the source; a collective.

    Args:
        mine: fingerprint by source.
    """
    everybody = run_on_all_ranks(lambda: dict(mine))
    for rank, theirs in enumerate(everybody):
        for name in sorted({*theirs, *everybody[0]}):
            if theirs.get(name) != everybody[0].get(name):
                return rank, name
    return None


def measure_disk(folder: Path) -> tuple[int, float]:
    """Returns the free bytes where a folder is or will be, and its write rate in bytes per second.

    Raises:
        OSError: nothing can be written there.
    """
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    path = folder / f".disk-test-{socket.gethostname()}"
    size = min(DISK_TEST, free // 2)
    try:
        with open(path, "wb", opener=no_link) as file:
            begin = time.perf_counter()
            file.write(bytes(size))
            file.flush()
            os.fsync(file.fileno())
            seconds = time.perf_counter() - begin
    finally:
        path.unlink(missing_ok=True)
    return free, size / seconds


@cache
def code_fingerprint() -> str:
    """Returns a digest of Stoker's source and of the versions of Python and torch."""
    digest = hashlib.sha256(f"{platform.python_version()} {torch.__version__}".encode())
    package = Path(__file__).parents[1]
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + path.read_bytes())
    return digest.hexdigest()


def _memory_problem(device: torch.device) -> str:
    """Writes a pattern and its complement into a part of the memory and reads them back."""
    size = MEMORY.get(device.type, MEMORY["cpu"])
    if device.type == "cuda":
        size = min(size, torch.cuda.mem_get_info(device)[0] // 4)
    cells = torch.empty(size // 8, dtype=torch.int64, device=device)
    for pattern in (0x5555555555555555, -0x5555555555555556):
        cells.fill_(pattern)
        wrong = int((cells != pattern).sum())
        if wrong:
            return f"{wrong} of {cells.numel()} memory cells returned wrong values"
    return ""


def product_problem(device: torch.device, multiply: Multiply) -> str:
    """Returns the error of a device's matrix products; empty if they are exact."""
    a, b = _factors(device)
    exact = torch.device("cpu") if device.type == "mps" else device  # Apple's GPU has no float64
    v = torch.arange(a.shape[1], device=exact, dtype=torch.float64).remainder(2 * WHOLE + 1)[:, None] - WHOLE
    found, left, right = (x.to(exact).double() for x in (multiply(a, b), a, b))
    if not torch.equal(found @ v, left @ (right @ v)):
        return "computes wrong matrix products"
    return ""


def bfloat16_problem(device: torch.device, multiply: Multiply) -> str:
    """Returns what is wrong with a device's bfloat16 matrix products, where those in float32 are exact."""
    a, b = _factors(device)
    backend = torch.backends.cuda.matmul
    before = backend.allow_bf16_reduced_precision_reduction
    backend.allow_bf16_reduced_precision_reduction = False  # else partial sums are rounded too
    try:
        found = multiply(a.bfloat16(), b.bfloat16())
    finally:
        backend.allow_bf16_reduced_precision_reduction = before
    return "" if torch.equal(found, (a @ b).bfloat16()) else "computes wrong matrix products in bfloat16"


def has_tensor_cores(device: torch.device) -> bool:
    """Returns whether training uses separate units for bfloat16."""
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def _factors(device: torch.device) -> tuple[Tensor, Tensor]:
    width = WIDTH.get(device.type, WIDTH["cpu"])
    made = torch.Generator(device).manual_seed(0)
    shape = (2, width, width)
    numbers = torch.randint(-WHOLE, WHOLE + 1, shape, generator=made, device=device, dtype=torch.float32)
    return numbers[0], numbers[1]


def _product_rate(device: torch.device) -> float:
    """Measures the rate of matrix products, FLOP/s."""
    a, b = _factors(device)
    if has_tensor_cores(device):
        a, b = a.bfloat16(), b.bfloat16()
    product = a @ b  # the first one loads the kernels
    return 2 * a.shape[0] ** 3 / min(_timed(device, lambda: torch.matmul(a, b, out=product)) for _ in range(ROUNDS))


def _reduced(device: torch.device) -> tuple[str, float]:
    """Returns what is wrong with an all-reduce over all processes, and its rate, bytes/s."""
    world = dist.get_world_size()
    mine = torch.full((REDUCED,), float(dist.get_rank() + 1), device=device)
    dist.all_reduce(mine.clone())  # the first one connects
    dist.barrier()
    summed = mine.clone()
    seconds = _timed(device, lambda: dist.all_reduce(summed))
    wrong = not torch.equal(summed, torch.full_like(summed, world * (world + 1) / 2))
    return "all-reduce returned wrong sums" if wrong else "", 4 * REDUCED / seconds


def _timed(device: torch.device, work: Callable[[], Tensor | None]) -> float:
    _wait(device)
    begin = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - begin


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _expected(device: torch.device, name: str) -> float | None:
    """Returns the FLOP/s that `stoker plan --calibrate` measured for such a device."""
    width = WIDTH.get(device.type, WIDTH["cpu"])
    try:
        kept = kept_calibration(name, 0 if device.type == "cuda" else torch.get_num_threads())
        precision = "bf16" if has_tensor_cores(device) else "fp32"
        return kept.matmul_rate(width, width, width, precision) if kept else None
    except UserError:  # stale, or for another device
        return None
