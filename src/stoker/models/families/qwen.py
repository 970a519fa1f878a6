"""Qwen 2 and 3: LLaMA's blocks with biases or norms of single heads; dense, or some blocks with experts."""

from __future__ import annotations

from dataclasses import replace

from stoker.models.families.facts import Region
from stoker.models.families.llama import ATTENTION, LLAMA, MLP
from stoker.models.families.mistral import EXPERTS

NORMED = replace(ATTENTION, shared=("self_attn.q_norm", "self_attn.k_norm"))
SHARED_EXPERT = Region(
    enter="mlp",
    column=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    row=("mlp.shared_expert.down_proj",),
    experts="mlp.experts",
    shared=("mlp.gate", "mlp.shared_expert_gate"),
)

QWEN2 = replace(LLAMA, name="qwen2")
QWEN3 = replace(LLAMA, name="qwen3", regions=(NORMED, MLP))
QWEN2_MOE = replace(LLAMA, name="qwen2_moe", regions=(ATTENTION, MLP, SHARED_EXPERT))
QWEN3_MOE = replace(LLAMA, name="qwen3_moe", regions=(NORMED, MLP, EXPERTS))
