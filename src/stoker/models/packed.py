"""Packed attention: many documents in one row, none of which sees another.

A micro-batch is laid out as one row without padding. Position ids restart at each document; attention runs
document by document, so its cost is the sum of the squares of their lengths and no mask is ever built.
transformers hands its queries, keys and values to `packed_attention` through its own attention interface.

Shapes: B batch (1 when packed), T tokens, H query heads, G key-value heads, K head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "stoker_packed"
_lengths: ContextVar[tuple[int, ...] | None] = ContextVar("document_lengths", default=None)


@contextmanager
def documents(lengths: Sequence[int] | None) -> Iterator[None]:
    """Within it, a row is documents of these lengths. Must enclose the backward pass too: recompute attends again."""
    token = _lengths.set(tuple(lengths) if lengths is not None else None)
    try:
        yield
    finally:
        _lengths.reset(token)


def packed_attention(
    module: nn.Module,
    query_BHTK: Tensor,
    key_BGTK: Tensor,
    value_BGTK: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each document; outside of `documents`, transformers' own scaled-dot-product attention."""
    lengths = _lengths.get()
    if lengths is None:
        return sdpa_attention_forward(
            module, query_BHTK, key_BGTK, value_BGTK, attention_mask, dropout=dropout, scaling=scaling, **options
        )
    if options.get("softcap") is not None or options.get("s_aux") is not None:
        raise NotImplementedError("packed attention has no soft cap and no sinks")  # found by the probe, see layout.py
    grouped = query_BHTK.shape[1] != key_BGTK.shape[1]
    parts = []
    for q, k, v in zip(
        query_BHTK.split(lengths, 2), key_BGTK.split(lengths, 2), value_BGTK.split(lengths, 2), strict=True
    ):
        banded = sliding_window is not None and q.shape[2] > sliding_window
        mask = _band(q.shape[2], sliding_window, q.device) if banded and sliding_window else None
        parts.append(
            F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scaling, enable_gqa=grouped
            )
        )
    return torch.cat(parts, dim=2).transpose(1, 2), None


def _band(length: int, window: int, device: torch.device) -> Tensor:
    """Which keys a query sees under a sliding window, shape (length, length)."""
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)[None, :]
    return (distance >= 0) & (distance < window)


def _mask(*arguments: Any, **options: Any) -> Tensor | None:
    return None if _lengths.get() is not None else sdpa_mask(*arguments, **options)


def register() -> None:
    """Makes the attention known to transformers under `NAME`."""
    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, _mask)
