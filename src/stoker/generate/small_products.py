"""Linear layers of a few tokens on the CPU, at the speed at which memory gives their weights.

For a few rows torch's ``x W^T`` reads W at a third of that speed (float32, MKL, AVX-512); ``(W x^T)^T`` with the rows
filled up to a power of two reads it in full: docs/log.md, 2026-11-22. The sums are the same up to rounding.

Shapes: N tokens, I input width, O output width.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MOST = 16  # tokens; with more, torch's own order is as fast


def product(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """``x W^T + b`` of up to `MOST` tokens, shape (N, O)."""
    rows = x_NI.shape[0]
    filled = max(2, 1 << (rows - 1).bit_length())
    if filled != rows:
        x_NI = F.pad(x_NI, (0, 0, 0, filled - rows))
    y_NO = torch.mm(weight_OI, x_NI.t()).t()[:rows].contiguous()
    return y_NO if bias_O is None else y_NO.add_(bias_O)


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    rows, weight = x.numel() // x.shape[-1], layer.weight
    plain = type(weight) in (Tensor, nn.Parameter)  # a quantised one has a type of its own
    if not plain or not 0 < rows <= MOST or x.dtype != torch.float32 or weight.dtype != torch.float32:
        return F.linear(x, weight, layer.bias)
    return product(x.reshape(rows, -1), weight, layer.bias).view(*x.shape[:-1], -1)


def plain_linears(model: nn.Module) -> list[nn.Linear]:
    """The linear layers of a model that are neither quantised nor anything else of their own."""
    return [layer for layer in model.modules() if type(layer) is nn.Linear]


@contextmanager
def small_products(layers: Iterable[nn.Linear]) -> Iterator[None]:
    """Gives those of the layers that are on the CPU this product within the block."""
    plain = [layer for layer in layers if "forward" not in vars(layer) and layer.weight.device.type == "cpu"]
    for layer in plain:
        layer.forward = partial(_forward, layer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in plain:
            del layer.forward
