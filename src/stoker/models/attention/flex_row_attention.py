"""Attention of a whole packed row in one call, by FlexAttention, for variants that flash attention does not support.

These are bounded scores (Gemma 2), attention sinks (GPT-OSS), ALiBi (BLOOM), and float32. FlexAttention compiles a
kernel for the score function and skips blocks that the mask leaves empty (Dong et al., 2024, "Flex Attention").

Shapes: B batch (1), Q queries, T keys, H query heads, G key-value heads, K head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from stoker.hardware.process_device import on_device
from stoker.models.attention.attention_scores import AttentionScores
from stoker.models.attention.packed_row import PackedRow
from stoker.models.autocast import in_product_dtype

PLACES = ("places",)  # their key among a row's masks
SMALLEST_HEAD = 16  # of the compiled kernel
# For fewer than 128 queries torch takes its kernel for decoding, which has no variant for more than 128 queries of a
# group of heads: rows of 65 tokens with two query heads a key-value head fail to compile.
ROW_KERNEL = {"BACKEND": "TRITON"}
NO_WINDOW = 1 << 30  # a number, so that layers with and without a window share compilations
COMPILATIONS = 64  # at most: a row's attention is not compiled beyond the limit, and holds all of its scores

Change = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def supports(query_BHQK: Tensor, value_BGTK: Tensor, scores: AttentionScores) -> bool:
    """Returns whether FlexAttention has a kernel for these tensors on this machine."""
    sizes = query_BHQK.shape[-1], value_BGTK.shape[-1]
    narrow = query_BHQK.dtype == torch.float64 or min(sizes) < SMALLEST_HEAD
    other = scores.dropout or scores.indices_BTN is not None
    return not other and not narrow and find_spec("triton") is not None


def flex_row_attention(
    row: PackedRow, q_BHQK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, scores: AttentionScores
) -> Tensor:
    """Causal attention within each segment and to its prefix, shape (B, H, Q, K)."""
    window, device = scores.window, q_BHQK.device
    q_BHQK, k_BGTK, v_BGTK = map(in_product_dtype, (q_BHQK, k_BGTK, v_BGTK))
    if PLACES not in row.masks:
        row.masks[PLACES] = _places(row, device)
    if ("blocks", window) not in row.masks:
        row.masks["blocks", window] = _block_mask(row, window, device)
    place_T = row.masks[PLACES].place_T
    return flex_with_sinks(
        q_BHQK,
        k_BGTK,
        v_BGTK,
        scores,
        kernel=_compiled(flex_attention, device.type),
        change=score_change(scores, lambda k: place_T[k], device),
        blocks=row.masks["blocks", window],
        options=ROW_KERNEL,
    )


def flex_with_sinks(
    q_BHQK: Tensor,
    k_BGTK: Tensor,
    v_BGTK: Tensor,
    scores: AttentionScores,
    *,
    kernel: Callable[..., Any],
    change: Change | None,
    blocks: BlockMask,
    options: dict[str, Any] | None = None,
) -> Tensor:
    """FlexAttention with grouped heads and attention sinks, shape (B, H, Q, K).

    Args:
        kernel: `flex_attention`, compiled or not.
        change: see `score_change`.
        options: of the kernel.
    """
    attended = kernel(
        q_BHQK,
        k_BGTK,
        v_BGTK,
        score_mod=change,
        block_mask=blocks,
        scale=scores.scaling,
        enable_gqa=q_BHQK.shape[1] != k_BGTK.shape[1],
        return_lse=scores.sinks_H is not None,
        kernel_options=options,
    )
    if scores.sinks_H is None:
        return attended
    out_BHQK, log_sum_BHQ = attended
    # A sink is one more logit without a value: the keys keep exp(log_sum) of exp(log_sum) + exp(sink).
    kept_BHQ = torch.sigmoid(log_sum_BHQ - scores.sinks_H.to(log_sum_BHQ.dtype)[None, :, None])
    return out_BHQK * kept_BHQ[..., None].to(out_BHQK.dtype)


@dataclass(frozen=True)
class _Places:
    """The segment and the position of each token of a row.

    Attributes:
        segment_T: the number of its segment.
        prefix_T: that of its segment's prefix; -1 without.
        place_T: its position in its document, the prefix included.
        queries_Q: indices of the tokens that are queries.
    """

    segment_T: Tensor
    prefix_T: Tensor
    place_T: Tensor
    queries_Q: Tensor


def _places(row: PackedRow, device: torch.device) -> _Places:
    number_of = {s.start: i for i, s in enumerate(row.segments)}
    lengths = [s.length for s in row.segments]
    prefixes = [number_of[s.prefix_start] if s.prefix_length else -1 for s in row.segments]
    place = np.concatenate([np.arange(s.prefix_length, s.prefix_length + s.length) for s in row.segments])
    starts = [(row.segments[run.segment].start + run.first, run.length) for run in row.stretches]
    queries = np.concatenate([np.arange(start, start + length) for start, length in starts])
    columns = (np.repeat(np.arange(len(lengths)), lengths), np.repeat(prefixes, lengths), place, queries)
    return _Places(*(on_device(column, device) for column in columns))


def _block_mask(row: PackedRow, window: int | None, device: torch.device) -> Any:
    """Returns the mask of the 128 x 128 blocks of scores that must be computed."""
    at: _Places = row.masks[PLACES]
    seen_keys = NO_WINDOW if window is None else window
    segment_Q, prefix_Q, place_Q = (x[at.queries_Q] for x in (at.segment_T, at.prefix_T, at.place_T))

    def seen(_: Tensor, __: Tensor, q: Tensor, k: Tensor) -> Tensor:
        distance = place_Q[q] - at.place_T[k]
        related = (segment_Q[q] == at.segment_T[k]) | (prefix_Q[q] == at.segment_T[k])
        return related & (distance >= 0) & (distance < seen_keys)

    # Uncompiled it would hold a mask of the whole row.
    return _compiled(create_block_mask, device.type)(seen, None, None, len(segment_Q), len(at.segment_T), device=device)


def score_change(scores: AttentionScores, place: Callable[[Tensor], Tensor], device: torch.device) -> Change | None:
    """Returns the change of the scores: a bound (Gemma 2), or ALiBi's bias (Press et al., 2022). Only differences
    of the bias within a row of scores matter, so it is the key's position times the slope of the head.

    Args:
        place: maps a key's index to its position.
    """
    softcap, slopes = scores.softcap, scores.slopes
    if softcap is not None:
        return lambda score, b, h, q, k: softcap * torch.tanh(score / softcap)
    if slopes is None:
        return None
    slopes_H = _on_device(slopes, device)
    return lambda score, b, h, q, k: score + slopes_H[h] * place(k)


@cache
def _on_device(slopes: tuple[float, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # generation may ask first, and training keeps them for its backward pass
        return torch.tensor(slopes, device=device)


@cache
def _compiled(function: Callable[..., Any], kind: str) -> Any:
    if kind != "cuda":
        return function
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, COMPILATIONS)
    return torch.compile(function)
