"""Changes of weights between transformers' and llama.cpp's order, each with its inverse.

Shapes: H heads, K rows of a head, O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Change(NamedTuple):
    """A change of one weight, by the model's configuration.

    Attributes:
        to_gguf: from transformers' to llama.cpp's form.
        from_gguf: its inverse.
    """

    to_gguf: Callable[[Tensor, Any], Tensor]
    from_gguf: Callable[[Tensor, Any], Tensor]


def neighbours(heads: str) -> Change:
    """Reorders the rows of each head from (first halves, second halves) to (pair, pair, ...).

    transformers rotates row i with row i + K/2 of a head of K rows; llama.cpp, for the Llama family, row 2i with
    row 2i + 1.

    Args:
        heads: the key of the configuration with the number of heads.
    """

    def swapped(weight: Tensor, config: Any, *, outer: int) -> Tensor:
        count = getattr(config, heads)
        inner = weight.shape[0] // count // outer
        return weight.view(count, outer, inner, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)

    return Change(
        lambda weight, config: swapped(weight, config, outer=2),
        lambda weight, config: swapped(weight, config, outer=weight.shape[0] // getattr(config, heads) // 2),
    )


def _by_kind(weight: Tensor, config: Any) -> Tensor:
    parts = weight.view(config.num_attention_heads, 3, -1, *weight.shape[1:])
    return parts.transpose(0, 1).reshape(weight.shape)


def _by_head(weight: Tensor, config: Any) -> Tensor:
    parts = weight.view(3, config.num_attention_heads, -1, *weight.shape[1:])
    return parts.transpose(0, 1).reshape(weight.shape)


# Norms that multiply by 1 + weight. The sum is computed in float64, so that its rounding is the only one.
PLUS_ONE = Change(
    lambda weight, config: (weight.double() + 1).float(), lambda weight, config: (weight.double() - 1).float()
)
TRANSPOSED = Change(lambda weight, config: weight.t(), lambda weight, config: weight.t())
# Query, key and value of each head in turn, to all queries, all keys, all values.
BY_KIND = Change(_by_kind, _by_head)
FLAT = Change(lambda weight, config: weight.squeeze(0), lambda weight, config: weight[None])


def parts_of(weight: Tensor, count: int) -> tuple[Tensor, ...]:
    """Returns the parts of a fused matrix, along its outputs: shape (O, I), or (experts, O, I)."""
    return weight.chunk(count, dim=-2) if count > 1 else (weight,)


def joined(parts: list[Tensor]) -> Tensor:
    """Returns the fused matrix of its parts; see `parts_of`."""
    return torch.cat(parts, dim=-2) if len(parts) > 1 else parts[0]
