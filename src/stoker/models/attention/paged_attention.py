"""Attention of one query a row to the keys in its pages, by FlexAttention.

The block mask holds a row's physical pages, so keys are read where they are, and no further than the row's own length
(as in `torch.nn.attention.experimental._paged_attention`; paging: Kwon et al., 2023, "PagedAttention").

Shapes: B rows, L pages of the longest row, T tokens of the pool, H query heads, G key-value heads, K head size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from stoker.models.attention.attention_scores import AttentionScores
from stoker.models.attention.flex_row_attention import flex_with_sinks, score_change
from stoker.models.attention.paged_rows import PAGE, PagedRows

COMPILATIONS = 256  # at most: one for each number of rows, size of the pool and kind of layer


def paged_attention(rows: PagedRows, q_BH1K: Tensor, k_1GTK: Tensor, v_1GTK: Tensor, scores: AttentionScores) -> Tensor:
    """Attention of each row's last token, shape (B, H, 1, K); zeros for rows that fill the batch."""
    kind = (scores.window, scores.chunk)
    if kind not in rows.masks:
        rows.masks[kind] = _block_mask(rows, _first_seen(rows, scores))
    _, first_N = rows.owners
    return flex_with_sinks(
        q_BH1K.to(k_1GTK.dtype),
        k_1GTK,
        v_1GTK,
        scores,
        kernel=_kernel(q_BH1K.device.type),
        change=score_change(scores, lambda k: first_N[k // PAGE] + k % PAGE, q_BH1K.device),
        blocks=rows.masks[kind],
    )


def _first_seen(rows: PagedRows, scores: AttentionScores) -> Tensor | None:
    """Returns the position of the first key that each row's token sees, shape (B,); None if it sees all."""
    if scores.window is not None:
        return (rows.lengths_B - scores.window).clamp(min=0)
    return None if scores.chunk is None else rows.positions_B // scores.chunk * scores.chunk


def _block_mask(rows: PagedRows, seen_from_B: Tensor | None) -> BlockMask:
    """Returns the mask of the pages that each row reads.

    All of them count as partly visible. With fully visible blocks torch's kernel divides the whole pool among its
    processors, and one of them would read a whole row.
    """
    table_BL, lengths_B = rows.table_BL, rows.lengths_B
    owner_N, first_N = rows.owners
    if seen_from_B is None:
        pages_BL, count_B = table_BL, (lengths_B + PAGE - 1) // PAGE
    else:
        skipped_B = seen_from_B // PAGE
        order_BL = skipped_B[:, None] + torch.arange(table_BL.shape[1], device=table_BL.device)
        pages_BL = table_BL.gather(1, order_BL.clamp(max=table_BL.shape[1] - 1))
        count_B = (lengths_B + PAGE - 1) // PAGE - skipped_B

    def seen(b: Tensor, _: Tensor, __: Tensor, k: Tensor) -> Tensor:
        place = first_N[k // PAGE] + k % PAGE
        near = place < lengths_B[b]
        near = near if seen_from_B is None else near & (place >= seen_from_B[b])
        return near & (owner_N[k // PAGE] == b)

    return BlockMask.from_kv_blocks(
        count_B.to(torch.int32)[:, None, None],
        pages_BL.to(torch.int32)[:, None, None],
        BLOCK_SIZE=(PAGE, PAGE),
        mask_mod=seen,
        seq_lengths=(1, rows.pages * PAGE),
        compute_q_blocks=False,
    )


@cache
def _kernel(kind: str) -> Callable[..., Any]:
    """Returns FlexAttention, on a GPU compiled for each shape: torch has no decoding kernel for any number of rows."""
    if kind != "cuda":
        return flex_attention

    def flex(q_BH1K: Tensor, k_1GTK: Tensor, v_1GTK: Tensor, **options: Any) -> Any:  # has its own compilations
        return flex_attention(q_BH1K, k_1GTK, v_1GTK, **options)

    compiled = torch.compile(flex, dynamic=False, fullgraph=True)

    def run(*tensors: Tensor, **options: Any) -> Any:
        limits: dict[str, Any] = {"recompile_limit": COMPILATIONS, "accumulated_recompile_limit": COMPILATIONS}
        # Within generation blocks that training has compiled run eagerly; this must not.
        with torch.compiler.set_stance("default"), torch._dynamo.config.patch(limits):
            return compiled(*tensors, **options)

    return run
