"""LLaMA: separate projections, gated MLP, rotary positions, grouped-query heads."""

from __future__ import annotations

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
