"""Attention through transformers' attention interface, for families whose code computes it directly.

Such a family's file replaces the method that computes attention on a model. With the implementation ``eager`` the
model's own method runs; with any other, such as packed attention, the replacement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn


def interface_of(config: Any) -> Callable[..., Any] | None:
    """Returns the attention function that a model is set to; None for ``eager``."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # takes a second, and all families import this file

    name = config._attn_implementation
    return None if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]


def attend_through(model: nn.Module, blocks: str) -> Iterator[Any]:
    """Makes the model's attention implementation settable; yields the blocks at a path."""
    model._can_set_attn_implementation = _yes  # type: ignore[assignment]  # transformers judges by the source
    yield from model.get_submodule(blocks).children()


def _yes() -> bool:
    return True


def attend(
    attention: Any,
    query_BHTK: Tensor,
    key_BHTK: Tensor,
    value_BHTK: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    sliding_window: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention in the place of the ``_attn`` of GPT-J and GPT-Neo, shape (B, H, T, K)."""
    interface = interface_of(attention.config)
    if interface is None:
        return type(attention)._attn(attention, query_BHTK, key_BHTK, value_BHTK, attention_mask)
    out_BTHK, weights = interface(
        attention,
        query_BHTK,
        key_BHTK,
        value_BHTK,
        attention_mask,
        dropout=attention.attn_dropout.p if attention.training else 0.0,
        scaling=scaling,
        sliding_window=sliding_window,
    )
    return out_BTHK.transpose(1, 2), weights
