"""StableLM: LLaMA's blocks with LayerNorm, a part of each head rotated."""

from __future__ import annotations

from dataclasses import replace

from stoker.models.families.llama import LLAMA

# `qk_layernorm` gets no fact: each head has norms of its own, and such a model is refused.
STABLELM = replace(
    LLAMA,
    name="stablelm",
    counts=("self_attn.num_heads",),
    key_counts=("self_attn.num_key_value_heads",),
)
