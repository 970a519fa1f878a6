"""GPT-Neo: learned positions, every other block attends to a window; its code computes attention directly."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stoker.models.attention import attention_patch
from stoker.models.attention.packed_row import active_row
from stoker.models.families.facts import Family, Region


def _attn(
    attention: Any, query_BHTK: Tensor, key_BHTK: Tensor, value_BHTK: Tensor, attention_mask: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    size = attention.config.window_size if attention.attention_type == "local" else None
    queries, keys = query_BHTK.shape[2], key_BHTK.shape[2]
    if attention_patch.interface_of(attention.config) is None:
        attention.bias = _mask(keys, keys, size, query_BHTK.device)
    elif size is not None and active_row() is None:
        # The model's own masks are causal and leave the window to this layer.
        window = _mask(queries, keys, size, query_BHTK.device)
        attention_mask = window if attention_mask is None else window & attention_mask
    tensors = (query_BHTK, key_BHTK, value_BHTK, attention_mask)
    return attention_patch.attend(attention, *tensors, scaling=1.0, sliding_window=size)  # scores are not scaled


def _mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Returns which keys the last queries see, shape (1, 1, queries, keys)."""
    place = torch.arange(keys, device=device)
    behind = place[keys - queries :, None] - place
    seen = behind >= 0 if window is None else (behind >= 0) & (behind < window)
    return seen[None, None]


def attend(model: nn.Module) -> None:
    """Attention through transformers' interface, which GPT-Neo's code does not use.

    Each of its blocks has a mask of the whole context; it is dropped, and built for the passes that need one.
    """
    for block in attention_patch.attend_through(model, GPT_NEO.blocks):
        attention = block.attn.attention
        attention.bias = attention.bias.new_empty(1, 1, 0, 0)
        attention._attn = partial(_attn, attention)


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
