"""GPT-NeoX (Pythia): one matrix interleaves each head's query, key and value, so it splits by heads."""

from __future__ import annotations

from stoker.models.families.facts import Family, Region

GPT_NEOX = Family(
    name="gpt_neox",
    blocks="gpt_neox.layers",
    embedding="gpt_neox.embed_in",
    first={"gpt_neox.embed_in": "absent", "gpt_neox.emb_dropout": "identity"},
    last=("gpt_neox.final_layer_norm",),
    regions=(
        Region(enter="attention", heads=True, column=("attention.query_key_value",), row=("attention.dense",)),
        Region(enter="mlp", column=("mlp.dense_h_to_4h",), row=("mlp.dense_4h_to_h",)),
    ),
    whole=("input_layernorm", "post_attention_layernorm"),
)
