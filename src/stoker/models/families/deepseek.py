"""DeepSeek V2 and V3 and GLM-4.7 Flash: latent attention, dense blocks first, experts with shared ones after them.

Every process computes the latent vectors of queries, keys and values, and from them its own heads.
"""

from __future__ import annotations

from dataclasses import replace

from stoker.models.families.facts import Region
from stoker.models.families.llama import LLAMA, MLP

LATENT = Region(
    enter="self_attn",
    heads=True,
    column=("self_attn.q_proj", "self_attn.q_b_proj", "self_attn.kv_b_proj"),
    row=("self_attn.o_proj",),
    shared=(
        "self_attn.q_a_proj",
        "self_attn.q_a_layernorm",
        "self_attn.kv_a_proj_with_mqa",
        "self_attn.kv_a_layernorm",
    ),
)
SHARED_EXPERTS = Region(
    enter="mlp",
    column=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    row=("mlp.shared_experts.down_proj",),
    experts="mlp.experts",
    shared=("mlp.gate",),
)

DEEPSEEK_V2 = replace(LLAMA, name="deepseek_v2", regions=(LATENT, MLP, SHARED_EXPERTS))
DEEPSEEK_V3 = replace(DEEPSEEK_V2, name="deepseek_v3")
GLM4_MOE_LITE = replace(DEEPSEEK_V2, name="glm4_moe_lite")
