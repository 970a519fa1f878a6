"""BLOOM: ALiBi, a norm after the embedding; its code computes attention directly."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stoker.models.attention.attention_patch import attend_through, interface_of
from stoker.models.families.facts import Family, Region


def _forward(  # the arguments are BloomBlock's
    attention: Any,
    config: Any,
    hidden_BTD: Tensor,
    residual_BTD: Tensor,
    alibi: Tensor,
    attention_mask: Tensor | None,
    layer_past: Any = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Runs the attention layer with dropout and the residual; returns the hidden states, shape (B, T, D).

    ``alibi`` counts positions along the row, which may hold several documents; the interface gets the slopes instead.
    """
    interface = interface_of(config)
    if interface is None:
        return type(attention).forward(
            attention, hidden_BTD, residual_BTD, alibi, attention_mask, layer_past=layer_past, **options
        )
    query, key, value = attention._reshape(attention.query_key_value(hidden_BTD))
    if layer_past is not None:
        key, value = layer_past.update(key, value, attention.layer_idx)
    out_BTHK, weights = interface(
        attention,
        query,
        key,
        value,
        attention_mask,
        dropout=attention.attention_dropout.p if attention.training else 0.0,
        scaling=attention.inv_norm_factor,
        slopes=attention.slopes,
    )
    out_BTD = attention.dense(out_BTHK.flatten(2))
    return residual_BTD + F.dropout(out_BTD, attention.hidden_dropout, attention.training), weights


def attend(model: nn.Module) -> None:
    """Attention through transformers' interface, which BLOOM's code does not use."""
    config: Any = model.config
    body: Any = model.base_model
    # The bias of position 1 is the slope.
    slopes = body.build_alibi_tensor(torch.ones(1, 2), config.n_head, torch.float32)[:, 0, 1].tolist()
    for block in attend_through(model, BLOOM.blocks):
        attention = block.self_attention
        attention.slopes = tuple(slopes)
        attention.forward = partial(_forward, attention, config)


BLOOM = Family(
    name="bloom",
    blocks="transformer.h",
    embedding="transformer.word_embeddings",
    first={"transformer.word_embeddings": "absent", "transformer.word_embeddings_layernorm": "identity"},
    last=("transformer.ln_f",),
    regions=(
        Region(
            enter="self_attention",
            heads=True,
            column=("self_attention.query_key_value",),
            row=("self_attention.dense",),
        ),
        Region(enter="mlp", column=("mlp.dense_h_to_4h",), row=("mlp.dense_4h_to_h",)),
    ),
    whole=("input_layernorm", "post_attention_layernorm"),
    counts=("self_attention.num_heads",),
    per_head=("self_attention.slopes",),
    attend=attend,
)
