"""Attention of a whole packed row in one call, by torch's flash attention for rows of many lengths.

Attention per document launches kernels for each document in each layer, and on a GPU the host is then the limit.
Documents with a common prefix have its keys and values gathered before their own.

Shapes: T tokens of the row, Q queries, S keys, H query heads, G key-value heads, K head size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from stoker.models.attention.attention_scores import AttentionScores
from stoker.models.attention.even_rows import even_attention
from stoker.models.attention.varlen_index import VarlenIndex
from stoker.models.autocast import autocast_dtype, in_product_dtype

LARGEST_HEAD, HEAD_STEP = 256, 8  # sizes of heads that flash attention has kernels for
# Before 2.12 torch's function has no such argument, and takes fewer key-value heads as they are.
ASKS_FOR_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters
kernel: Callable[..., Any] = varlen_attn


def supports(index: VarlenIndex, query_BHTK: Tensor, value_BGTK: Tensor) -> bool:
    """Returns whether the kernel supports these tensors, under the current autocast."""
    size = query_BHTK.shape[-1]
    return (
        index.flash
        and (autocast_dtype(query_BHTK) or query_BHTK.dtype) in (torch.float16, torch.bfloat16)
        and size == value_BGTK.shape[-1]
        and size <= LARGEST_HEAD
        and size % HEAD_STEP == 0
    )


def varlen_attention(
    index: VarlenIndex, q_BHQK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, scores: AttentionScores
) -> Tensor:
    """Causal attention of each run of queries to its keys, shape (1, Q, H, K); of plain scores."""
    window = scores.window
    q_HQK, k_GTK, v_GTK = (in_product_dtype(x.squeeze(0)) for x in (q_BHQK, k_BGTK, v_BGTK))
    if index.even is not None and (window is None or window >= index.even):
        return even_attention(index.even, q_HQK, k_GTK, v_GTK, scores.scaling)[None]
    q_QHK, k_SGK, v_SGK = (x.transpose(0, 1) for x in (q_HQK, k_GTK, v_GTK))
    if index.keys is not None:
        k_SGK, v_SGK = k_SGK[index.keys], v_SGK[index.keys]
    grouped = {"enable_gqa": True} if ASKS_FOR_GROUPS and q_BHQK.shape[1] != k_BGTK.shape[1] else {}
    left = -1 if window is None else window - 1  # whatever the row's lengths, so that a compiled block need not ask
    return kernel(
        q_QHK.contiguous(),
        k_SGK.contiguous(),
        v_SGK.contiguous(),
        index.query_bounds,
        index.key_bounds,
        index.longest_queries,
        index.longest_keys,
        scale=scores.scaling,
        window_size=(left, 0),
        **grouped,
    )[None]
