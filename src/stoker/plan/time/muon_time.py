"""Seconds of Muon's orthogonalised updates, in addition to reading and writing states (`stoker.train.optim.muon`)."""

from __future__ import annotations

from collections import Counter
from math import ceil

from stoker.plan.block_dtypes import FLOAT, HALF
from stoker.plan.setting import Setting
from stoker.plan.time.efficiency import Efficiency, matmul_seconds
from stoker.plan.time.network_cost import CollectiveGroup, collective_seconds

ITERATIONS = 5  # of Newton and Schulz
AT_ONCE = 1 << 26  # elements that are exchanged at a time, unless one matrix of each process has more
Sizes = tuple[int, int]


def muon_seconds(setting: Setting, efficiency: Efficiency) -> float:
    """Returns the seconds of the process of the pipeline that takes longest.

    The processes with the same weights share the work. Low-rank matrices, which only a critic of the policy can have,
    are too small to count.
    """
    if setting.work.tuning != "full":
        return 0.0
    sharing, longest = sharing_processes(setting), 0.0
    for process in range(setting.layout.pipeline):
        matrices = stepped_matrices(setting, process)
        seconds = {sizes: _products_seconds(setting, sizes, efficiency) for sizes in matrices}
        total = sum(count * seconds[sizes] for sizes, count in matrices.items())
        busiest = max([total / sharing, *seconds.values()])
        longest = max(longest, busiest + _exchange_seconds(setting, process, efficiency))
    return longest


def sharing_processes(setting: Setting) -> int:
    """Returns the number of processes with the same weights, or shards of them."""
    return setting.layout.data // setting.layout.islands * setting.layout.context


def stepped_matrices(setting: Setting, process: int, *, experts: bool = True) -> Counter[Sizes]:
    """Returns the number of matrices of each size (outputs, inputs) in the blocks of a pipeline process.

    Args:
        experts: whether those of experts are counted.
    """
    found: Counter[Sizes] = Counter()
    for layer, count in setting.blocks[process].items():
        for matmul in setting.shape.matmuls(layer):
            if matmul.copies > 1 and not experts:
                continue
            held = max(1, matmul.copies // setting.expert) if matmul.copies > 1 else 1
            for outputs in matmul.modules:
                found[outputs, matmul.inputs] += count * held
    return found


def products_of(rows: int, columns: int) -> tuple[tuple[int, int, int], ...]:
    """Returns the products (m, n, k) of an iteration: with its transpose, that one's square, and both with it."""
    small, large = sorted((rows, columns))
    return (small, small, large), (small, small, small), (small, large, small)


def _exchange_seconds(setting: Setting, process: int, efficiency: Efficiency) -> float:
    """Returns the seconds to bring sharded rows to the owners of matrices and back, and results to all copies.

    Shards of experts are whole matrices.
    """
    layout, cluster = setting.layout, setting.cluster
    bytes_each = FLOAT if cluster.device.is_cpu else HALF
    copies = layout.data * layout.context // (layout.islands * layout.sharers)
    everything, rows = (stepped_matrices(setting, process, experts=experts) for experts in (True, False))
    seconds = 0.0
    if copies > 1:
        group = CollectiveGroup(copies, layout.sharers * layout.tensor)
        elements = _elements(everything) / layout.sharers
        calls = ceil(elements / AT_ONCE)
        seconds += collective_seconds("all-gather", bytes_each * elements, group, cluster, efficiency, calls=calls)
    if layout.sharers > 1:
        group = CollectiveGroup(layout.sharers, layout.tensor)
        elements = _elements(rows) / copies / layout.sharers
        calls = _rounds(rows, copies * layout.sharers)
        seconds += 2 * collective_seconds("all-to-all", bytes_each * elements, group, cluster, efficiency, calls=calls)
    return seconds


def _rounds(matrices: Counter[Sizes], processes: int) -> int:
    """Returns the number of exchanges of a step."""
    largest = max((rows * columns for rows, columns in matrices), default=1)
    return ceil(_elements(matrices) / max(AT_ONCE, processes * largest))


def _elements(matrices: Counter[Sizes]) -> int:
    return sum(count * rows * columns for (rows, columns), count in matrices.items())


def _products_seconds(setting: Setting, sizes: Sizes, efficiency: Efficiency) -> float:
    device, calibration = setting.cluster.device, setting.cluster.calibration
    precision = "fp32" if device.is_cpu else "bf16"
    seconds = 0.0
    for m, n, k in products_of(*sizes):
        flop = 2.0 * ITERATIONS * m * n * k
        if calibration is not None and precision in calibration.precisions:
            seconds += flop / calibration.matmul_rate(m, n, k, precision)
        else:
            peak = device.peak(precision) * efficiency.matmul
            seconds += matmul_seconds(flop, rows=m, inputs=k, outputs=n, peak=peak, of=efficiency)
    return seconds
