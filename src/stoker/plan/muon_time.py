"""Seconds of Muon's orthogonalised updates, in addition to reading and writing states (`stoker.train.muon`)."""

from __future__ import annotations

from collections import Counter

from stoker.plan.eager_traits import code_of
from stoker.plan.efficiency import Efficiency, matmul_seconds
from stoker.plan.matmul import Matmul
from stoker.plan.network_cost import CollectiveGroup, collective_seconds
from stoker.plan.saved_activations import FLOAT
from stoker.plan.setting import Setting
from stoker.plan.shape import Shape

ITERATIONS = 5  # of Newton and Schulz
Sizes = tuple[int, int]


def muon_seconds(setting: Setting, efficiency: Efficiency) -> float:
    """Returns the seconds of the process of the pipeline that takes longest.

    Every process orthogonalises all matrices of its blocks whole. Updates of sharded ones are gathered in float32.
    Low-rank matrices, which only a critic of the policy can have, are too small to count.
    """
    if setting.work.tuning != "full":
        return 0.0
    group = CollectiveGroup(setting.layout.sharers, setting.layout.tensor)
    longest = 0.0
    for process in range(setting.layout.pipeline):
        matrices = stepped_matrices(setting, process)
        seconds = sum(count * _products_seconds(setting, sizes, efficiency) for sizes, count in matrices.items())
        moved = FLOAT * sum(count * rows * columns for (rows, columns), count in matrices.items())
        seconds += collective_seconds(
            "all-gather", moved, group, setting.cluster, efficiency, calls=sum(matrices.values())
        )
        longest = max(longest, seconds)
    return longest


def stepped_matrices(setting: Setting, process: int) -> Counter[Sizes]:
    """Returns the number of matrices of each size (the smaller one first) in the blocks of a pipeline process."""
    found: Counter[Sizes] = Counter()
    for layer, count in setting.blocks[process].items():
        for matmul in setting.shape.matmuls(layer):
            held = max(1, matmul.copies // setting.expert) if matmul.copies > 1 else 1
            for outputs in _modules(matmul, setting.shape):
                small, large = sorted((matmul.inputs, outputs))
                found[small, large] += count * held
    return found


def products_of(rows: int, columns: int) -> tuple[tuple[int, int, int], ...]:
    """Returns the products (m, n, k) of an iteration: with its transpose, that one's square, and both with it."""
    return (rows, rows, columns), (rows, rows, rows), (rows, columns, rows)


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


def _modules(matmul: Matmul, shape: Shape) -> tuple[int, ...]:
    """Returns the outputs of each module of a product; layers that are fused in checkpoints are split in training,
    and the gates of experts are stacked with their first product."""
    if matmul.copies > 1:
        return (matmul.outputs,)
    if matmul.parts:
        return matmul.parts
    if matmul.name == "qkv" and not code_of(shape).one_qkv:
        return shape.query_width, shape.key_value_width, shape.key_value_width
    if matmul.name == "up" and shape.gated:
        return (matmul.outputs // 2,) * 2
    return (matmul.outputs,)
