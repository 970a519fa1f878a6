"""Newton-Schulz iterations of Muon (Jordan et al., 2024).

Shapes: N matrices of R rows and C columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.775, 2.0315)  # of the quintic with the largest slope at zero
ITERATIONS, EPS = 5, 1e-7


def orthogonalised(x_NRC: Tensor, dtype: torch.dtype) -> Tensor:
    """Approximates U V^T of each matrix U S V^T, by five iterations: singular values become 0.7 to 1.2.

    Args:
        dtype: dtype of the computation and of the result.
    """
    a, b, c = COEFFICIENTS
    tall = x_NRC.shape[-2] > x_NRC.shape[-1]
    y = (x_NRC.mT if tall else x_NRC).to(dtype)
    del x_NRC  # freed before the iterations, unless the caller keeps it
    y = y / y.norm(dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for _ in range(ITERATIONS):
        gram = y @ y.mT
        y = y.baddbmm(gram.baddbmm(gram, gram, beta=b, alpha=c), y, beta=a)
    return y.mT if tall else y


def orthogonalised_together(xs: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Applies `orthogonalised` to tensors of shape (N, R, C), those of one R and C at once."""
    by_shape: dict[torch.Size, list[int]] = {}
    for number, x in enumerate(xs):
        by_shape.setdefault(x.shape[-2:], []).append(number)
    found: dict[int, Tensor] = {}
    for numbers in by_shape.values():
        done = orthogonalised(torch.cat([xs[number] for number in numbers]), dtype)
        found |= zip(numbers, done.split([len(xs[number]) for number in numbers]), strict=True)
    return [found[number] for number in range(len(xs))]
