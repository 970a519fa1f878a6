"""Packed attention: many documents in one row that do not attend to each other.

A micro-batch is one row without padding (see `collate`). Position ids restart at each document. Attention
runs segment by segment on a CPU, and in one call on a GPU: its cost is the sum of the squares of the segments' lengths,
and no mask of the whole row is built.
transformers calls `packed_attention` through its attention interface.

Shapes: B batch (1 when packed), T tokens, H query heads, G key-value heads, K head size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import find_packed_sequence_indices as _find_packed_sequence_indices
from transformers.masking_utils import sdpa_mask

from stoker.models.attention import flex_row_attention, varlen_attention
from stoker.models.attention.attention_scores import AttentionScores
from stoker.models.attention.collate import Segment
from stoker.models.attention.packed_row import PackedRow, active_row, in_chunks
from stoker.models.attention.paged_attention import paged_attention
from stoker.models.attention.paged_rows import PagedRows
from stoker.models.attention.selected_keys import selection_mask, selection_of, selects_all
from stoker.models.autocast import in_product_dtype

NAME = "stoker_packed"


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
    slopes: tuple[float, ...] | None = None,
    chunk: int | None = None,
    indices: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each segment and to its prefix, or to a row's pages; without either, transformers' own.

    On a GPU it is one call for the whole row where a kernel computes it, and torch.compile sees through that call.

    Args:
        sliding_window: how many keys a query sees, its own included; None for all.
        softcap: bound of the scores (Gemma 2).
        s_aux: logit of each head's attention sink, shape (H,) (GPT-OSS).
        slopes: ALiBi slope of each head (BLOOM).
        chunk: tokens of the chunks that do not attend to each other (Llama 4). A given mask separates them already.
        indices: the keys that a query sees, of those up to its own, shape (B, T, N), in a packed row numbered within
            its segment and its prefix (DeepSeek V3.2).
    """
    row = active_row()
    if indices is not None and isinstance(row, PackedRow) and selects_all(indices, row):
        indices = None
    scores = AttentionScores(dropout, scaling, sliding_window, softcap, s_aux, slopes, chunk, indices)
    if row is None:
        return _unpacked(module, query_BHTK, key_BGTK, value_BGTK, attention_mask, scores, **options), None
    if isinstance(row, PagedRows):
        return paged_attention(row, query_BHTK, key_BGTK, value_BGTK, scores).transpose(1, 2), None
    if chunk is not None:
        row = in_chunks(row, chunk)
    index = row.index if row.across is None and scores.are_plain else None
    if index is not None and varlen_attention.supports(index, query_BHTK, value_BGTK):
        return varlen_attention.varlen_attention(index, query_BHTK, key_BGTK, value_BGTK, scores), None
    return _packed(row, query_BHTK, key_BGTK, value_BGTK, scores), None


@torch.compiler.disable
def _unpacked(
    module: nn.Module,
    query_BHTK: Tensor,
    key_BGTK: Tensor,
    value_BGTK: Tensor,
    mask: Tensor | None,
    scores: AttentionScores,
    **options: Any,
) -> Tensor:
    """Attention with the model's own mask, shape (B, T, H, K)."""
    slopes, dropout, scaling = scores.slopes, scores.dropout, scores.scaling
    if mask is None and (slopes is not None or not scores.are_fused):
        keys, queries = key_BGTK.shape[2], query_BHTK.shape[2]
        mask = visibility_mask(Segment(0, queries, 0, keys - queries), None, query_BHTK.device)
    if scores.indices_BTN is not None:
        assert mask is not None
        mask = mask & selection_mask(scores.indices_BTN, key_BGTK.shape[2])[:, None]
    if slopes is not None:
        assert mask is not None
        mask = alibi_bias(mask, slopes, query_BHTK.dtype)
    if not scores.are_fused:
        return scored_attention(query_BHTK, key_BGTK, value_BGTK, mask, scores).transpose(1, 2).contiguous()
    if query_BHTK.shape[2] == 1 and query_BHTK.shape[1] != key_BGTK.shape[1]:
        return _one_query(query_BHTK, key_BGTK, value_BGTK, mask, dropout=dropout, scaling=scaling)
    tensors = (query_BHTK, key_BGTK, value_BGTK, mask)
    return sdpa_attention_forward(module, *tensors, dropout=dropout, scaling=scaling, **options)[0]


@torch.compiler.disable  # segments differ from batch to batch, so each would be compiled again
def _packed(
    row: PackedRow, query_BHTK: Tensor, key_BGTK: Tensor, value_BGTK: Tensor, scores: AttentionScores
) -> Tensor:
    """Attention within the segments of a row, shape (B, T, H, K)."""
    if row.across is not None:
        scores = scores.of_heads(row.across.heads(query_BHTK.shape[1]))
        query_BHTK, key_BGTK, value_BGTK = row.across.enter(*map(in_product_dtype, (query_BHTK, key_BGTK, value_BGTK)))
    tensors = (query_BHTK, key_BGTK, value_BGTK)
    if row.index is not None and scores.are_plain and varlen_attention.supports(row.index, query_BHTK, value_BGTK):
        out_BHTK = varlen_attention.varlen_attention(row.index, *tensors, scores).transpose(1, 2)
    elif row.index is not None and flex_row_attention.supports(query_BHTK, value_BGTK, scores):
        out_BHTK = flex_row_attention.flex_row_attention(row, *tensors, scores)
    else:
        out_BHTK = _by_segment(row, *tensors, scores)
    # Contiguous, as transformers' own: AFMoE takes a view of it.
    return (out_BHTK if row.across is None else row.across.leave(out_BHTK)).transpose(1, 2).contiguous()


def _by_segment(
    row: PackedRow, query_BHTK: Tensor, key_BGTK: Tensor, value_BGTK: Tensor, scores: AttentionScores
) -> Tensor:
    """Computes attention segment by segment, shape (B, H, T, K)."""
    grouped = query_BHTK.shape[1] != key_BGTK.shape[1]
    parts = []
    # Split once, not sliced segment by segment: the gradient of a split is one concatenation.
    queries = query_BHTK.split([stretch.length for stretch in row.stretches], dim=2)
    keys, values = (x.split([s.length for s in row.segments], dim=2) for x in (key_BGTK, value_BGTK))
    number_of = {s.start: i for i, s in enumerate(row.segments)}
    for stretch, q in zip(row.stretches, queries, strict=True):
        s = row.segments[stretch.segment]
        end = stretch.first + stretch.length
        k, v = (x[stretch.segment][:, :, :end] for x in (keys, values))
        if s.prefix_length:
            prefix = number_of[s.prefix_start]
            k, v = torch.cat((keys[prefix], k), dim=2), torch.cat((values[prefix], v), dim=2)
        before = s.prefix_length + stretch.first  # keys that all of these queries see
        window = scores.window if scores.window is not None and k.shape[2] > scores.window else None
        masked = before or window is not None or scores.slopes is not None or not scores.are_fused
        mask = _mask_of(row, Segment(0, stretch.length, 0, before), window, scores.slopes, q) if masked else None
        selected = selection_of(scores.indices_BTN, s) if scores.indices_BTN is not None else None
        if selected is not None:
            mask = selected & (visibility_mask(s, None, q.device) if mask is None else mask)
        if scores.are_fused:
            part = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                dropout_p=scores.dropout,
                is_causal=mask is None,
                scale=scores.scaling,
                enable_gqa=grouped,
            )
        else:
            part = scored_attention(q, k, v, mask, scores)
        parts.append(part)
    return torch.cat(parts, dim=2)


def _one_query(
    query_BH1K: Tensor,
    key_BGTK: Tensor,
    value_BGTK: Tensor,
    mask: Tensor | None,
    *,
    dropout: float,
    scaling: float | None,
) -> Tensor:
    """Computes attention of one query per row, shape (B, 1, H, K): the heads of a group are queries of one head.

    So keys and values need not be repeated for each head, which would dominate the time of a long row.
    """
    batch, heads, _, size = query_BH1K.shape
    grouped_BGNK = query_BH1K.view(batch, key_BGTK.shape[1], -1, size)
    out_BGNK = F.scaled_dot_product_attention(
        grouped_BGNK, key_BGTK, value_BGTK, attn_mask=mask, dropout_p=dropout, scale=scaling
    )
    return out_BGNK.reshape(batch, 1, heads, -1)


def _mask_of(row: PackedRow, s: Segment, window: int | None, slopes: tuple[float, ...] | None, query: Tensor) -> Tensor:
    key = (s.length, s.prefix_length, window, slopes, query.dtype)
    if key not in row.masks:
        mask = visibility_mask(s, window, query.device)
        row.masks[key] = mask if slopes is None else alibi_bias(mask, slopes, query.dtype)
    return row.masks[key]


def visibility_mask(s: Segment, window: int | None, device: torch.device) -> Tensor:
    """Returns the mask of keys (prefix, then own) that a query sees, shape (length, prefix_length + length)."""
    query = torch.arange(s.length, device=device)[:, None] + s.prefix_length
    distance = query - torch.arange(s.prefix_length + s.length, device=device)[None, :]
    return (distance >= 0) & (distance < window) if window is not None else distance >= 0


def alibi_bias(mask: Tensor, slopes: tuple[float, ...], dtype: torch.dtype) -> Tensor:
    """Returns the bias that ALiBi adds to the scores (Press et al., 2022), shape (1 or B, H, queries, keys).

    It is the key's position times the slope of the head. Only differences within a row of scores matter, so positions
    may start at any key.

    Args:
        mask: true where a query sees a key, shape (queries, keys) or (B, 1, queries, keys).
    """
    positions = torch.arange(mask.shape[-1], device=mask.device, dtype=torch.float32)
    slopes_H = torch.tensor(slopes, device=mask.device, dtype=torch.float32)
    bias = (slopes_H[:, None, None] * positions).to(dtype)
    return torch.where(mask, bias, torch.finfo(dtype).min).view(-1, len(slopes), *mask.shape[-2:])


def scored_attention(
    q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, mask: Tensor | None, form: AttentionScores
) -> Tensor:
    """Computes attention with explicit scores, for variants that the fused kernels do not support; shape (B, H, T, K).

    The mask is true, or 0, where a query sees a key. A sink takes its part of the softmax and adds no value.
    """
    heads = q_BHTK.shape[1]
    k_BHTK, v_BHTK = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k_BGTK, v_BGTK))
    scores = q_BHTK @ k_BHTK.transpose(2, 3) * (q_BHTK.shape[-1] ** -0.5 if form.scaling is None else form.scaling)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if form.softcap is not None:
        scores = form.softcap * torch.tanh(scores / form.softcap)
    if mask is not None:
        mask = mask[..., : k_BHTK.shape[2]]
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min) if mask.dtype == torch.bool else scores + mask
    if form.sinks_H is not None:
        sinks = form.sinks_H.to(scores.dtype).view(1, heads, 1, 1).expand(scores.shape[0], heads, scores.shape[2], 1)
        weights = torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return F.dropout(weights.to(v_BHTK.dtype), form.dropout, training=form.dropout > 0) @ v_BHTK


def _mask(*arguments: Any, **options: Any) -> Tensor | None:
    return None if active_row() else sdpa_mask(*arguments, **options)


def _sequence_indices(position_ids: Tensor) -> Tensor | None:
    """Returns the document of each token of a row, for transformers' masks; None for an active packed row.

    Finding it reads a number from the device, for which the host would wait in every forward pass.
    """
    return None if active_row() else _find_packed_sequence_indices(position_ids)


def register() -> None:
    """Registers the attention with transformers under `NAME`."""
    masking_utils.find_packed_sequence_indices = _sequence_indices
    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, _mask)
