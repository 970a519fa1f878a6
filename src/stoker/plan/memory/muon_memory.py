"""Bytes of Muon's step beside weights, gradients and momenta (`stoker.train.optim.muon`)."""

from __future__ import annotations

from collections import Counter
from math import ceil

from stoker.grouping import grouped
from stoker.plan.block_dtypes import FLOAT, HALF
from stoker.plan.setting import Setting
from stoker.plan.time.muon_time import AT_ONCE, Sizes, sharing_processes, stepped_matrices


def muon_bytes(setting: Setting, process: int) -> float:
    """Returns the most bytes that the step of a process of the pipeline holds, over its groups of matrices."""
    if not setting.software.muon or setting.work.tuning != "full":
        return 0.0
    matrices, sharing = stepped_matrices(setting, process), sharing_processes(setting)
    most = max(AT_ONCE, sharing * max(map(_elements, matrices), default=0))
    size = FLOAT if setting.cluster.device.is_cpu else HALF
    shards = setting.layout.sharers
    groups = grouped(_in_order(matrices, most), _elements, most)
    return max((_bytes_together(Counter(some), size, sharing, shards) for some in groups), default=0.0)


def _in_order(matrices: Counter[Sizes], most: int) -> list[Sizes]:
    """Returns matrices by falling cost; of one cost at most three groups of ``most`` elements, mixed evenly."""
    alike: Counter[Sizes] = Counter()
    for sizes, count in matrices.items():
        alike[min(sizes), max(sizes)] += count
    placed: list[tuple[float, float, Sizes]] = []
    for sizes, count in matrices.items():
        total = alike[min(sizes), max(sizes)]
        kept = ceil(count * min(1.0, 3 * (most // _elements(sizes)) / total))
        placed += [(-_elements(sizes) * min(sizes), (at + 0.5) / kept, sizes) for at in range(kept)]
    return [sizes for _, _, sizes in sorted(placed)]


def _bytes_together(matrices: Counter[Sizes], size: int, sharing: int, shards: int) -> float:
    """Returns the most bytes while matrices are orthogonalised together.

    Args:
        size: bytes of an element of the iterations.
        sharing: number of processes that share the work.
        shards: number of them that have rows of each matrix, or experts of each tensor.
    """
    everything = sum(count * _elements(sizes) for sizes, count in matrices.items())
    own = max(everything / sharing, *map(_elements, matrices), 0.0) if sharing > 1 else everything
    iterated = done = 0.0
    for sizes, count in matrices.items():
        number = ceil(count / sharing)
        stacked = number * _elements(sizes)
        # The matrices before and after an iteration, and their product with their transpose and its polynomial.
        iterated = max(iterated, max(0.0, min(done, own - stacked)) + 2 * stacked + 2 * number * min(sizes) ** 2)
        done += stacked
    # Of sharded matrices: this process' rows, those it received, and the whole ones.
    moments = [(1 if shards == 1 else 3) * own + iterated]
    if shards > 1:
        moments.append(5 * own)  # the rows, those received, the results, the message with them and its answer
    if sharing > shards:
        gathered = min(AT_ONCE, sharing / shards * own)  # pieces of the results of all copies, beside those in a row
        moments += [2 * own, own + gathered * (1 + shards / sharing)]
    widest = (FLOAT + size) * own if size != FLOAT else 0.0  # Nesterov's momentum, and its cast
    return max(widest, size * max(moments))


def _elements(sizes: Sizes) -> int:
    return sizes[0] * sizes[1]
