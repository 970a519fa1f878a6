"""GLM and GLM-4, the successors of ChatGLM: LLaMA's blocks with gate and up projection in one matrix."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stoker.models.families.facts import Fused, Region
from stoker.models.families.llama import ATTENTION, LLAMA


def _halves(config: Any) -> tuple[int, ...]:
    return (config.intermediate_size, config.intermediate_size)


GATE_UP = Fused("mlp.gate_up_proj", ("gate", "up"), _halves)
FUSED_MLP = Region(enter="mlp", column=("mlp.gate_up_proj.gate", "mlp.gate_up_proj.up"), row=("mlp.down_proj",))

GLM = replace(LLAMA, name="glm", regions=(ATTENTION, FUSED_MLP), fused=(GATE_UP,))
GLM4 = replace(GLM, name="glm4", whole=(*LLAMA.whole, "post_self_attn_layernorm", "post_mlp_layernorm"))
