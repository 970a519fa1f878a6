"""Phi (attention and MLP side by side), Phi-3 (LLaMA's blocks with fused layers) and Phi-3.5 MoE (gpt-oss' blocks)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stoker.models.families.facts import Fused, Region
from stoker.models.families.glm import FUSED_MLP, GATE_UP
from stoker.models.families.gpt_oss import GPT_OSS
from stoker.models.families.llama import ATTENTION, LLAMA


def _heads(config: Any) -> tuple[int, ...]:
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return (config.num_attention_heads * size, *2 * (config.num_key_value_heads * size,))


PHI = replace(
    LLAMA,
    name="phi",
    first={"model.embed_tokens": "absent", "model.embed_dropout": "identity"},
    last=("model.final_layernorm",),
    regions=(
        replace(ATTENTION, row=("self_attn.dense",), shared=("self_attn.q_layernorm", "self_attn.k_layernorm")),
        Region(enter="mlp", column=("mlp.fc1",), row=("mlp.fc2",)),
    ),
    whole=("input_layernorm",),
)
PHI3 = replace(
    LLAMA,
    name="phi3",
    regions=(
        Region(
            enter="self_attn",
            heads=True,
            column=("self_attn.qkv_proj.query", "self_attn.qkv_proj.key", "self_attn.qkv_proj.value"),
            keys_values=("self_attn.qkv_proj.key", "self_attn.qkv_proj.value"),
            row=("self_attn.o_proj",),
        ),
        FUSED_MLP,
    ),
    fused=(Fused("self_attn.qkv_proj", ("query", "key", "value"), _heads), GATE_UP),
    counts=("self_attn.config.num_attention_heads",),
    key_counts=("self_attn.num_key_value_heads",),
)
PHIMOE = replace(GPT_OSS, name="phimoe", per_head=())
