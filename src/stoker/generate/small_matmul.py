"""Linear layers for a few tokens on the CPU, at the memory bandwidth of their weights.

For one or two rows torch's ``x W^T`` reads W at a third of that bandwidth (float32, MKL, AVX-512); ``(W x^T)^T`` with
the rows padded to a power of two reads it in full. For more rows a copy of W in oneDNN's blocked layout is twice as
fast as either: docs/log.md, 2026-11-22. The sums are equal up to rounding.

Shapes: N tokens, I input width, O output width.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from weakref import WeakKeyDictionary, WeakSet

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn

MOST = 16  # tokens; with more, torch's own order is as fast
PACKED = 3  # tokens from which on a blocked weight is faster
SHARE_OF_MEMORY = 0.25  # share of free memory for blocked weights


class BlockedWeights:
    """Copies of a frozen model's weights in oneDNN's blocked layout, each made when its layer first gets a few
    tokens, and dropped with it. Layers that are added later, as those of loaded adapters, have no copy.
    """

    def __init__(self, layers: Iterable[nn.Linear]) -> None:
        self._layers = WeakSet(layers)
        needed = sum(layer.weight.nbytes for layer in self._layers)
        known = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        self._enough = known and needed <= psutil.virtual_memory().available * SHARE_OF_MEMORY
        self._held: WeakKeyDictionary[nn.Linear, Tensor] = WeakKeyDictionary()

    def product(self, layer: nn.Linear, x_NI: Tensor) -> Tensor | None:
        """Returns ``x W^T + b``, shape (N, O); None if this layer has no copy."""
        held = self._held.get(layer)
        if held is None:
            if not self._enough or x_NI.shape[0] > MOST or layer not in self._layers:
                return None
            held = self._held[layer] = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), MOST)
        found: Tensor = torch.ops.mkldnn._linear_pointwise(x_NI, held, layer.bias, "none", [], "")
        return found


def product(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Returns ``x W^T + b`` for up to `MOST` tokens, shape (N, O)."""
    rows = x_NI.shape[0]
    filled = max(2, 1 << (rows - 1).bit_length())
    if filled != rows:
        x_NI = torch.cat((x_NI, x_NI[: filled - rows]))
    y_NO = torch.mm(weight_OI, x_NI.t()).t()[:rows].contiguous()
    return y_NO if bias_O is None else y_NO.add_(bias_O)


def _forward(layer: nn.Linear, blocked: BlockedWeights | None, x: Tensor) -> Tensor:
    rows, weight = x.numel() // x.shape[-1], layer.weight
    plain = type(weight) in (Tensor, nn.Parameter)  # quantised weights have their own type
    if plain and rows and x.dtype == weight.dtype == torch.float32:
        x_NI = x.reshape(rows, -1)
        found = blocked.product(layer, x_NI) if blocked is not None and rows >= PACKED else None
        if found is None and rows <= MOST:
            found = product(x_NI, weight, layer.bias)
        if found is not None:
            return found.view(*x.shape[:-1], -1)
    return F.linear(x, weight, layer.bias)


def plain_linears(model: nn.Module) -> list[nn.Linear]:
    """Returns a model's plain linear layers, neither quantised nor of a subclass."""
    return [layer for layer in model.modules() if type(layer) is nn.Linear]


@contextmanager
def small_matmuls(layers: Iterable[nn.Linear], blocked: BlockedWeights | None = None) -> Iterator[None]:
    """Replaces the product of those layers that are on the CPU within the block.

    Args:
        blocked: blocked copies, if the layers' weights do not change.
    """
    plain = [layer for layer in layers if "forward" not in vars(layer) and layer.weight.device.type == "cpu"]
    for layer in plain:
        layer.forward = partial(_forward, layer, blocked)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in plain:
            del layer.forward
