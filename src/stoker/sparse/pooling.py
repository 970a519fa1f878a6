"""Sum pooling of rows by bag, and its gradient, each in one pass over the rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from stoker.sparse.kernels import kernels


def pool(
    rows: Tensor, inverse: np.ndarray, lengths: np.ndarray, weights: Tensor | None, sizes: Sequence[int]
) -> tuple[Tensor, ...]:
    """Returns the weighted sums of the bags' rows, [bags, width] for each feature.

    Args:
        rows: [unique, width].
        inverse: int64 [n], the row of each id.
        lengths: int64 [bags], number of ids in each bag, feature by feature.
        weights: [n], in the dtype of the rows; None for 1.
        sizes: number of bags of each feature.
    """
    at = torch.from_numpy(inverse)
    if weights is None and (lengths == 1).all():
        return _Pool.apply(rows, at, None, None, sizes)
    return _Pool.apply(rows, at, torch.from_numpy(lengths), weights, sizes)


class _Pool(torch.autograd.Function):
    """torch's `embedding_bag` with a gradient that is several times faster."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, at: Tensor, lengths: Tensor | None, weights: Tensor | None, sizes: Sequence[int]
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(at, lengths, weights)
        ctx.set_materialize_grads(False)
        ctx.count, ctx.sizes, ctx.like = len(rows), sizes, rows.new_empty(0, rows.shape[1])
        if lengths is None:
            found = torch.from_numpy(np.take(rows.numpy(), at.numpy(), axis=0))
        elif len(at):
            found = F.embedding_bag(at, rows, lengths.cumsum(0) - lengths, mode="sum", per_sample_weights=weights)
        else:
            found = rows.new_zeros(len(lengths), rows.shape[1])
        return found.split(list(sizes))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        at, lengths, weights = ctx.saved_tensors
        return kernels().sum_bags(at, ctx.count, grads, ctx.sizes, lengths, weights, ctx.like), None, None, None, None
