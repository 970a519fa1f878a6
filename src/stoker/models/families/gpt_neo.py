"""GPT-Neo: learned positions, every other block attends to a window; its code computes attention directly."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from stoker.models.attention import attention_patch
from stoker.models.attention.packed_row import active_row
from stoker.models.families.facts import Family, Region


def _attn(
    attention: Any, query_BHTK: Tensor, key_BHTK: Tensor, value_BHTK: Tensor, attention_mask: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    local = attention.attention_type == "local"
    through = attention_patch.interface_of(attention.config) is not None
    # The model's own masks are causal and leave the window to this layer.
    if through and local and active_row() is None:
        queries, keys = query_BHTK.shape[2], key_BHTK.shape[2]
        window = attention.bias[:, :, keys - queries : keys, :keys]
        attention_mask = window if attention_mask is None else window & attention_mask
    tensors = (query_BHTK, key_BHTK, value_BHTK, attention_mask)
    size = attention.config.window_size if local else None
    return attention_patch.attend(attention, *tensors, scaling=1.0, sliding_window=size)  # scores are not scaled


def attend(model: nn.Module) -> None:
    """Attention through transformers' interface, which GPT-Neo's code does not use."""
    for block in attention_patch.attend_through(model, GPT_NEO.blocks):
        block.attn.attention._attn = partial(_attn, block.attn.attention)


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
