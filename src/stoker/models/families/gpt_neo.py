"""GPT-Neo: learned positions, every other block attends to a window; its attention is written out in its code."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from stoker.models.attention_patch import attend_through, interface_of
from stoker.models.families.facts import Family, Region
from stoker.models.packed_attention import in_segments


def _attn(
    attention: Any, query_BHTK: Tensor, key_BHTK: Tensor, value_BHTK: Tensor, attention_mask: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """What stands between the projections, shape (B, H, T, K). GPT-Neo does not scale its scores."""
    interface = interface_of(attention.config)
    if interface is None:
        return type(attention)._attn(attention, query_BHTK, key_BHTK, value_BHTK, attention_mask)
    local = attention.attention_type == "local"
    if local and not in_segments():  # the model's own masks are causal and leave the window to this layer
        queries, keys = query_BHTK.shape[2], key_BHTK.shape[2]
        window = attention.bias[:, :, keys - queries : keys, :keys]
        attention_mask = window if attention_mask is None else window & attention_mask
    out_BTHK, weights = interface(
        attention,
        query_BHTK,
        key_BHTK,
        value_BHTK,
        attention_mask,
        dropout=attention.attn_dropout.p if attention.training else 0.0,
        scaling=1.0,
        sliding_window=attention.config.window_size if local else None,
    )
    return out_BTHK.transpose(1, 2), weights


def attend(model: nn.Module) -> None:
    """Attention through transformers' interface, which GPT-Neo's code does not know."""
    for block in attend_through(model, GPT_NEO.blocks):
        attention = block.attn.attention  # type: ignore[union-attr]
        attention._attn = partial(_attn, attention)  # type: ignore[union-attr]


GPT_NEO = Family(
    name="gpt_neo",
    blocks="transformer.h",
    embedding="transformer.wte",
    first={"transformer.wte": "absent", "transformer.wpe": "zero", "transformer.drop": "identity"},
    last=("transformer.ln_f",),
    regions=(
        Region(
            enter="attn",
            heads=True,
            column=("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"),
            row=("attn.attention.out_proj",),
        ),
        Region(enter="mlp", column=("mlp.c_fc",), row=("mlp.c_proj",)),
    ),
    whole=("ln_1", "ln_2"),
    positions=("transformer.wpe",),
    counts=("attn.attention.num_heads",),
    attend=attend,
)
