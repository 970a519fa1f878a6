"""Packed attention: many documents in one row, none of which sees another.

A micro-batch is laid out as one row without padding (see rows.py). Position ids restart at each document;
attention runs segment by segment, so its cost is the sum of the squares of their lengths and no mask of the
whole row is ever built.
transformers hands its queries, keys and values to `packed_attention` through its own attention interface.

Shapes: B batch (1 when packed), T tokens, H query heads, G key-value heads, K head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from stoker.models.rows import Segment

NAME = "stoker_packed"


@dataclass(frozen=True)
class _PackedRow:
    """The row at hand, and the masks of its segments: made in the first layer, used in all."""

    segments: tuple[Segment, ...]
    masks: dict[tuple[int, int, int | None], Tensor] = field(default_factory=dict)


_row: ContextVar[_PackedRow | None] = ContextVar("packed_row", default=None)


@contextmanager
def segments(layout: Sequence[Segment] | None) -> Iterator[None]:
    """Within it, rows are laid out so. Must enclose the backward pass too: recompute attends again."""
    token = _row.set(_PackedRow(tuple(layout)) if layout is not None else None)
    try:
        yield
    finally:
        _row.reset(token)


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
    """Causal attention within each segment and to its prefix; outside of `segments`, transformers' own attention."""
    row = _row.get()
    if row is None:
        return sdpa_attention_forward(
            module, query_BHTK, key_BGTK, value_BGTK, attention_mask, dropout=dropout, scaling=scaling, **options
        )
    if options.get("softcap") is not None or options.get("s_aux") is not None:
        raise NotImplementedError("packed attention has no soft cap and no sinks")  # found by the probe, see layout.py
    grouped = query_BHTK.shape[1] != key_BGTK.shape[1]
    parts = []
    for s in row.segments:
        q = query_BHTK.narrow(2, s.start, s.length)
        k, v = (_with_prefix(x, s) for x in (key_BGTK, value_BGTK))
        bounded = sliding_window is not None and k.shape[2] > sliding_window
        mask = _visible(row, s, sliding_window if bounded else None, q.device) if s.prefix_length or bounded else None
        parts.append(
            F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scaling, enable_gqa=grouped
            )
        )
    return torch.cat(parts, dim=2).transpose(1, 2), None


def _with_prefix(x_BGTK: Tensor, s: Segment) -> Tensor:
    own = x_BGTK.narrow(2, s.start, s.length)
    if not s.prefix_length:
        return own
    return torch.cat((x_BGTK.narrow(2, s.prefix_start, s.prefix_length), own), dim=2)


def _visible(row: _PackedRow, s: Segment, window: int | None, device: torch.device) -> Tensor:
    key = (s.length, s.prefix_length, window)
    if key not in row.masks:
        row.masks[key] = visible(s, window, device)
    return row.masks[key]


def visible(s: Segment, window: int | None, device: torch.device) -> Tensor:
    """Which keys (prefix, then own) a query of a segment sees, shape (length, prefix_length + length)."""
    query = torch.arange(s.length, device=device)[:, None] + s.prefix_length
    distance = query - torch.arange(s.prefix_length + s.length, device=device)[None, :]
    return (distance >= 0) & (distance < window) if window is not None else distance >= 0


def _mask(*arguments: Any, **options: Any) -> Tensor | None:
    return None if _row.get() is not None else sdpa_mask(*arguments, **options)


def register() -> None:
    """Makes the attention known to transformers under `NAME`."""
    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, _mask)
