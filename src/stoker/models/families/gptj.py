"""GPT-J: attention and MLP in parallel after one norm, rotary positions; its code computes attention directly."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from stoker.models.attention import attention_patch
from stoker.models.families.facts import Family, Region


def _attn(
    attention: Any, query_BHTK: Tensor, key_BHTK: Tensor, value_BHTK: Tensor, attention_mask: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    scaling = 1.0 / float(attention.scale_attn)
    return attention_patch.attend(attention, query_BHTK, key_BHTK, value_BHTK, attention_mask, scaling=scaling)


def attend(model: nn.Module) -> None:
    """Attention through transformers' interface, which GPT-J's code does not use."""
    for block in attention_patch.attend_through(model, GPTJ.blocks):
        block.attn._attn = partial(_attn, block.attn)


GPTJ = Family(
    name="gptj",
    blocks="transformer.h",
    embedding="transformer.wte",
    first={"transformer.wte": "absent", "transformer.drop": "identity"},
    last=("transformer.ln_f",),
    regions=(
        Region(enter="attn", heads=True, column=("attn.q_proj", "attn.k_proj", "attn.v_proj"), row=("attn.out_proj",)),
        Region(enter="mlp", column=("mlp.fc_in",), row=("mlp.fc_out",)),
    ),
    whole=("ln_1",),
    counts=("attn.num_attention_heads",),
    attend=attend,
)
