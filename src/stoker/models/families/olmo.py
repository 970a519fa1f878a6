"""OLMo 1 to 3: LLaMA's blocks; since OLMo 2 with norms after attention and MLP, and norms over all heads at once."""

from __future__ import annotations

from dataclasses import replace

from stoker.models.families.llama import ATTENTION, LLAMA, MLP

WIDE_NORMED = replace(
    ATTENTION,
    keys_values=(*ATTENTION.keys_values, "self_attn.k_norm"),
    wide_norms=("self_attn.q_norm", "self_attn.k_norm"),
)

OLMO = replace(LLAMA, name="olmo")
OLMO2 = replace(
    LLAMA, name="olmo2", regions=(WIDE_NORMED, MLP), whole=("post_attention_layernorm", "post_feedforward_layernorm")
)
OLMO3 = replace(OLMO2, name="olmo3")
