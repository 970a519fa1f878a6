"""Falcon's attention, without scores in memory: with the one key-value head of its own code PyTorch uses no fused
kernel. Its layout facts are not known.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from stoker.models.autocast import in_product_dtype
from stoker.models.blocks import blocks_of


def _forward(  # the arguments are FalconAttention's
    attention: Any,
    hidden_BTD: Tensor,
    alibi: Tensor | None,
    attention_mask: Tensor | None,
    position_ids: Tensor | None = None,
    layer_past: Any = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Runs the attention layer, shape (B, T, D), with one view of its keys and values for each query head."""
    if output_attentions or attention.config._attn_implementation != "sdpa":
        return type(attention).forward(
            *(attention, hidden_BTD, alibi, attention_mask, position_ids, layer_past),
            output_attentions=output_attentions,
            position_embeddings=position_embeddings,
        )
    parts = attention._split_heads(attention.query_key_value(hidden_BTD))
    query_BHTK, key_BGTK, value_BGTK = (part.transpose(1, 2) for part in parts)
    if alibi is None:
        from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

        assert position_embeddings is not None
        query_BHTK, key_BGTK = apply_rotary_pos_emb(query_BHTK, key_BGTK, *position_embeddings)
    if layer_past is not None:
        key_BGTK, value_BGTK = layer_past.update(key_BGTK, value_BGTK, attention.layer_idx)
    heads = query_BHTK.shape[1]  # a cast behind `expand` would copy
    key_BHTK, value_BHTK = (in_product_dtype(x).expand(-1, heads, -1, -1) for x in (key_BGTK, value_BGTK))
    dropout = attention.attention_dropout.p if attention.training and alibi is not None else 0.0
    out_BHTK = F.scaled_dot_product_attention(
        in_product_dtype(query_BHTK),
        key_BHTK,
        value_BHTK,
        attn_mask=attention_mask,
        dropout_p=dropout,
        is_causal=attention_mask is None and query_BHTK.shape[2] > 1,
    )
    return attention.dense(out_BHTK.transpose(1, 2).flatten(2)), None


def attend(model: nn.Module) -> None:
    """Attention by a fused kernel, and layers that are products with a bias in one operator, as LoRA needs them."""
    for block in blocks_of(model):
        attention: Any = block.self_attention
        attention.forward = partial(_forward, attention)
        for module in block.modules():
            if isinstance(module, nn.Linear) and type(module).__name__ == "FalconLinear":
                module.__class__ = nn.Linear
