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


# The rows in work, the innermost last. A plain list and no context variable: on a GPU the backward pass, in
# which recompute attends again, runs in threads of autograd's own, and those see no context.
_rows: list[_PackedRow | None] = [None]


@contextmanager
def segments(layout: Sequence[Segment] | None) -> Iterator[None]:
    """Within it, rows are laid out so. Must enclose the backward pass too: recompute attends again."""
    _rows.append(_PackedRow(tuple(layout)) if layout is not None else None)
    try:
        yield
    finally:
        _rows.pop()


@torch.compiler.disable  # segments differ from batch to batch: traced, each batch would be compiled anew
def packed_attention(
    module: nn.Module,
    query_BHTK: Tensor,
    key_BGTK: Tensor,
    value_BGTK: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each segment and to its prefix; outside of `segments`, transformers' own.

    Args:
        sliding_window: how many keys a query sees, its own included; None for all.
        softcap: bound of the scores (Gemma 2).
        s_aux: logit of each head's attention sink, shape (H,) (GPT-OSS).
    """
    plain = softcap is None and s_aux is None  # what torch's fused kernels compute
    how: dict[str, Any] = {"dropout": dropout, "scaling": scaling, "softcap": softcap, "sinks_H": s_aux}
    row = _rows[-1]
    if row is None:
        if plain:
            return sdpa_attention_forward(
                module,
                query_BHTK,
                key_BGTK,
                value_BGTK,
                attention_mask,
                dropout=dropout,
                scaling=scaling,
                **options,
            )
        keys, queries = key_BGTK.shape[2], query_BHTK.shape[2]
        mask = attention_mask
        if mask is None:
            mask = visible(Segment(0, queries, 0, keys - queries), None, query_BHTK.device)
        out = scored_attention(query_BHTK, key_BGTK, value_BGTK, mask=mask, **how)
        return out.transpose(1, 2), None
    grouped = query_BHTK.shape[1] != key_BGTK.shape[1]
    parts = []
    # Split once, not sliced segment by segment: the gradient of a split is one concatenation.
    lengths = [s.length for s in row.segments]
    queries, keys, values = (x.split(lengths, dim=2) for x in (query_BHTK, key_BGTK, value_BGTK))
    number_of = {s.start: i for i, s in enumerate(row.segments)}
    for s, q, k, v in zip(row.segments, queries, keys, values, strict=True):
        if s.prefix_length:
            prefix = number_of[s.prefix_start]
            k, v = torch.cat((keys[prefix], k), dim=2), torch.cat((values[prefix], v), dim=2)  # noqa: PLW2901
        window = sliding_window if sliding_window is not None and k.shape[2] > sliding_window else None
        masked = s.prefix_length or window is not None or not plain
        mask = _visible(row, s, window, q.device) if masked else None
        if plain:
            part = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                dropout_p=dropout,
                is_causal=mask is None,
                scale=scaling,
                enable_gqa=grouped,
            )
        else:
            part = scored_attention(q, k, v, mask=mask, **how)
        parts.append(part)
    return torch.cat(parts, dim=2).transpose(1, 2), None


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


def scored_attention(
    q_BHTK: Tensor,
    k_BGTK: Tensor,
    v_BGTK: Tensor,
    *,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """Attention with its scores written out, for what the fused kernels do not compute; shape (B, H, T, K).

    The mask is true, or 0, where a query sees a key. A sink takes its share of the softmax and adds nothing.
    """
    heads = q_BHTK.shape[1]
    k_BHTK, v_BHTK = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k_BGTK, v_BGTK))
    scores = q_BHTK @ k_BHTK.transpose(2, 3) * (q_BHTK.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        mask = mask[..., : k_BHTK.shape[2]]
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min) if mask.dtype == torch.bool else scores + mask
    if sinks_H is not None:
        sinks = sinks_H.to(scores.dtype).view(1, heads, 1, 1).expand(scores.shape[0], heads, scores.shape[2], 1)
        weights = torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return F.dropout(weights.to(v_BHTK.dtype), dropout, training=dropout > 0) @ v_BHTK


def _mask(*arguments: Any, **options: Any) -> Tensor | None:
    return None if _rows[-1] is not None else sdpa_mask(*arguments, **options)


def register() -> None:
    """Makes the attention known to transformers under `NAME`."""
    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, _mask)
