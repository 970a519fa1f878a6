"""Attention of documents of one length as a batch, by cuDNN's kernel, which takes no rows of many lengths.

It is used where `stoker.models.attention.attention_kernels` has measured that it is faster.

Shapes: N documents of L tokens, T = N * L tokens of the row, H query heads, G key-value heads, K head size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

MOST_SHAPES = 4  # (N, L): cuDNN plans a kernel for each, which takes longer than it saves in a few steps
BACKEND = SDPBackend.CUDNN_ATTENTION


class EvenRows:
    """Which rows of this process are computed as batches: none unless enabled, and then those of the first shapes."""

    def __init__(self) -> None:
        self._enabled = False
        self._shapes: set[tuple[int, int]] = set()

    def enable(self) -> None:
        self._enabled = True

    def disable(self) -> None:
        self._enabled = False
        self._shapes.clear()

    def admit(self, documents: int, length: int) -> bool:
        """Returns whether a row of ``documents`` documents, each of ``length`` tokens, is computed as a batch."""
        if self._enabled and len(self._shapes) < MOST_SHAPES:
            self._shapes.add((documents, length))
        return self._enabled and (documents, length) in self._shapes


even_rows = EvenRows()


def keep_cudnn_for_even_rows() -> None:
    """Switches cuDNN's kernel off for all other attention, for which torch 2.11 prefers it on Hopper.

    Planning it for a new shape takes about a second for both passes, and padded rows, prompts and steps of decoding
    have many shapes (pytorch#155958).
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def even_attention(length: int, q_HTK: Tensor, k_GTK: Tensor, v_GTK: Tensor, scaling: float | None) -> Tensor:
    """Causal attention within each document of ``length`` tokens, shape (T, H, K)."""
    q_NHLK, k_NGLK, v_NGLK = (x.unflatten(1, (-1, length)).transpose(0, 1) for x in (q_HTK, k_GTK, v_GTK))
    with sdpa_kernel(BACKEND):
        out_NHLK = F.scaled_dot_product_attention(
            q_NHLK, k_NGLK, v_NGLK, is_causal=True, scale=scaling, enable_gqa=q_HTK.shape[0] != k_GTK.shape[0]
        )
    return out_NHLK.transpose(1, 2).flatten(0, 1)
