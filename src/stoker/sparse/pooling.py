"""Sums of rows, bag by bag, and gradients of those sums, each with one pass over the rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def pool(rows: Tensor, inverse: np.ndarray, lengths: np.ndarray, weights: Tensor | None) -> Tensor:
    """The weighted sum of each bag's rows. [bags, width].

    Args:
        rows: [unique, width].
        inverse: int64 [n], the row of each id.
        lengths: int64 [bags], ids of each bag.
        weights: [n], in the type of the rows; None for 1.
    """
    at = torch.from_numpy(inverse)
    if weights is None and (lengths == 1).all():
        return _Pool.apply(rows, at, None, None)
    return _Pool.apply(rows, at, torch.from_numpy(lengths), weights)


class _Pool(torch.autograd.Function):
    """torch's `embedding_bag`, whose own gradient takes several times as long."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, at: Tensor, lengths: Tensor | None, weights: Tensor | None) -> Tensor:
        ctx.count = len(rows)
        ctx.save_for_backward(at, *(x for x in (lengths, weights) if x is not None))
        ctx.has_lengths, ctx.has_weights = lengths is not None, weights is not None
        if lengths is None:
            return torch.from_numpy(np.take(rows.numpy(), at.numpy(), axis=0))
        return _bags(at, rows, _offsets(lengths), weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads: Tensor) -> tuple[Tensor, None, None, None]:
        at, *rest = ctx.saved_tensors
        lengths = rest.pop(0) if ctx.has_lengths else None
        order = _order(at, ctx.count)
        sources = order if lengths is None else torch.repeat_interleave(lengths)[order]
        weights = rest[0][order] if ctx.has_weights else None
        offsets = _offsets(torch.bincount(at, minlength=ctx.count))
        return _bags(sources, grads.contiguous(), offsets, weights), None, None, None


def _order(at: Tensor, count: int) -> Tensor:
    """The stable order of numbers below ``count``, by radix sort where they have 16 bits."""
    if count <= 2**16:
        return torch.from_numpy(np.argsort(at.numpy().astype(np.uint16), kind="stable"))
    return torch.sort(at.to(torch.int32), stable=True)[1]


def _offsets(lengths: Tensor) -> Tensor:
    return lengths.cumsum(0) - lengths


def _bags(at: Tensor, rows: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
    if not len(offsets) or not len(at):
        return rows.new_zeros(len(offsets), rows.shape[1])
    return F.embedding_bag(at, rows, offsets, mode="sum", per_sample_weights=weights)
