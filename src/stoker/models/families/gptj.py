"""GPT-J: attention and MLP side by side after one norm, rotary positions; its attention is written out in its code."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from stoker.models.attention_patch import attend_through, interface_of
from stoker.models.families.facts import Family, Region


def _attn(
    attention: Any, query_BHTK: Tensor, key_BHTK: Tensor, value_BHTK: Tensor, attention_mask: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """What stands between the rotation of queries and keys and the output projection, shape (B, H, T, K)."""
    interface = interface_of(attention.config)
    if interface is None:
        return type(attention)._attn(attention, query_BHTK, key_BHTK, value_BHTK, attention_mask)
    out_BTHK, weights = interface(
        attention,
        query_BHTK,
        key_BHTK,
        value_BHTK,
        attention_mask,
        dropout=attention.attn_dropout.p if attention.training else 0.0,
        scaling=1.0 / float(attention.scale_attn),
    )
    return out_BTHK.transpose(1, 2), weights


def attend(model: nn.Module) -> None:
    """Attention through transformers' interface, which GPT-J's code does not know."""
    for block in attend_through(model, GPTJ.blocks):
        block.attn._attn = partial(_attn, block.attn)  # type: ignore[union-attr]


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
