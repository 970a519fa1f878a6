"""Scores of a chunk of products and their gradient as pure functions, which torch.compile makes few passes over them.

They compute what `stoker.models.chunked_head` computes in place, for a vocabulary that is not split.

Shapes: C positions of a chunk, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor


def transform(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def accumulator(low: Tensor) -> torch.dtype:
    """The type in which sums over products of a type are computed."""
    return torch.float64 if low.dtype == torch.float64 else torch.float32


def scores_of_products(
    product_CV: Tensor, t_C: Tensor, scale: float, softcap: float | None, *, entropy: bool, slope: bool, summed: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Returns the log-probabilities of targets, whether each is the likeliest token, the entropies, all of shape (C,),
    and the gradient of the summed cross entropy with respect to the products.

    Args:
        entropy, slope: whether entropies and the gradient are computed; None otherwise.
        summed: whether the first two are summed over the positions.
    """
    logits_CV = transform(product_CV.to(accumulator(product_CV)) * scale, softcap)
    top_C, best_C = logits_CV.max(dim=1, keepdim=True)
    p_CV = (logits_CV - top_C).exp()
    total_C = p_CV.sum(dim=1, keepdim=True)
    log_p_C = (logits_CV.gather(1, t_C[:, None]) - (total_C.log() + top_C)).squeeze(1)
    right_C = (best_C == t_C[:, None]).squeeze(1)
    entropy_C = None
    if entropy:
        entropy_C = (total_C.log() - torch.xlogy(p_CV, p_CV).sum(dim=1, keepdim=True) / total_C).squeeze(1)
    grad_CV = None
    if slope:
        grad_CV = _before_transform(p_CV / total_C - _hits(p_CV, t_C), logits_CV, scale, softcap).to(product_CV.dtype)
    return (log_p_C.sum(), right_C.sum(), entropy_C, grad_CV) if summed else (log_p_C, right_C, entropy_C, grad_CV)


def slope_of_scores(
    product_CV: Tensor,
    t_C: Tensor,
    scale: float,
    softcap: float | None,
    slope_C: Tensor,
    entropy_C: Tensor | None,
    entropy_slope_C: Tensor | None,
) -> Tensor:
    """Returns the gradient of the products, given that of log-probabilities and, unless None, entropies with theirs."""
    logits_CV = transform(product_CV.to(accumulator(product_CV)) * scale, softcap)
    log_p_CV = logits_CV.log_softmax(dim=1)
    grad_CV = (_hits(log_p_CV, t_C) - log_p_CV.exp()) * slope_C[:, None]
    if entropy_C is not None and entropy_slope_C is not None:
        grad_CV = grad_CV - log_p_CV.exp() * (log_p_CV + entropy_C[:, None]) * entropy_slope_C[:, None]
    return _before_transform(grad_CV, logits_CV, scale, softcap).to(product_CV.dtype)


def _hits(like_CV: Tensor, t_C: Tensor) -> Tensor:
    """One at each target, and zero elsewhere."""
    return (t_C[:, None] == torch.arange(like_CV.shape[1], device=t_C.device)).to(like_CV.dtype)


def _before_transform(grad_CV: Tensor, logits_CV: Tensor, scale: float, softcap: float | None) -> Tensor:
    grad_CV = grad_CV * scale
    return grad_CV if softcap is None else grad_CV * (1 - (logits_CV / softcap) ** 2)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True)


def compiled(function: Callable[..., Any], *arguments: Tensor | float | None, **more: Any) -> Any:
    """Calls a function of this file, compiled for chunks of any number of positions."""
    for argument in arguments:  # the vocabulary stays static, so that rows are known to be aligned
        if isinstance(argument, Tensor):
            torch._dynamo.maybe_mark_dynamic(argument, 0)
    return _compiled(function)(*arguments, **more)
