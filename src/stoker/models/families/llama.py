"""LLaMA and families with its blocks: separate projections, gated MLP, rotary positions, grouped-query heads."""

from __future__ import annotations

from dataclasses import replace

from stoker.models.families.facts import Family, Region

ATTENTION = Region(
    enter="self_attn",
    heads=True,
    column=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    keys_values=("self_attn.k_proj", "self_attn.v_proj"),
    row=("self_attn.o_proj",),
)
MLP = Region(enter="mlp", column=("mlp.gate_proj", "mlp.up_proj"), row=("mlp.down_proj",))

LLAMA = Family(
    name="llama",
    blocks="model.layers",
    embedding="model.embed_tokens",
    first={"model.embed_tokens": "absent"},
    last=("model.norm",),
    regions=(ATTENTION, MLP),
    whole=("input_layernorm", "post_attention_layernorm"),
    groups=("self_attn.num_key_value_groups",),
)

# Their configurations differ: biases, layers without rotary positions, sliding windows, interleaved rotary positions.
SAME_BLOCKS = tuple(
    replace(LLAMA, name=name)
    for name in ("smollm3", "seed_oss", "ernie4_5", "cwm", "ministral", "ministral3", "helium")
)
