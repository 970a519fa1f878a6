"""OPT: learned positions, biases everywhere; 350m has norms after the layers and narrower embeddings."""

from __future__ import annotations

from stoker.models.families.facts import Family, Region

OPT = Family(
    name="opt",
    blocks="model.decoder.layers",
    embedding="model.decoder.embed_tokens",
    first={
        "model.decoder.embed_tokens": "absent",
        "model.decoder.embed_positions": "zero",
        "model.decoder.project_in": "identity",
    },
    last=("model.decoder.final_layer_norm", "model.decoder.project_out"),
    regions=(
        Region(
            enter="self_attn",
            heads=True,
            column=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            row=("self_attn.out_proj",),
        ),
        Region(enter="fc1", column=("fc1",), row=("fc2",)),
    ),
    whole=("self_attn_layer_norm", "final_layer_norm"),
    positions=("model.decoder.embed_positions",),
    counts=("self_attn.num_heads",),
)
