"""GPT-2: learned positions; queries, keys and values in one matrix; weights stored as (inputs, outputs)."""

from __future__ import annotations

from typing import Any

from stoker.models.families.facts import Family, Fused, Region


def _thirds(config: Any) -> tuple[int, ...]:
    return 3 * (config.hidden_size,)


GPT2 = Family(
    name="gpt2",
    blocks="transformer.h",
    embedding="transformer.wte",
    first={"transformer.wte": "absent", "transformer.wpe": "zero", "transformer.drop": "identity"},
    last=("transformer.ln_f",),
    regions=(
        Region(
            enter="attn",
            heads=True,
            column=("attn.c_attn.query", "attn.c_attn.key", "attn.c_attn.value"),
            row=("attn.c_proj",),
        ),
        Region(enter="mlp", column=("mlp.c_fc",), row=("mlp.c_proj",)),
    ),
    whole=("ln_1", "ln_2"),
    positions=("transformer.wpe",),
    counts=("attn.split_size", "attn.num_heads"),
    fused=(Fused("attn.c_attn", ("query", "key", "value"), _thirds),),
    transposed=("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
)
