"""ERNIE 4.5 and Hunyuan with experts: LLaMA's attention, and an MLP for all tokens beside the experts."""

from __future__ import annotations

from dataclasses import replace

from stoker.models.families.deepseek import SHARED_EXPERTS
from stoker.models.families.hunyuan import NORMED
from stoker.models.families.llama import ATTENTION, LLAMA, MLP
from stoker.models.families.mistral import EXPERTS

ERNIE4_5_MOE = replace(LLAMA, name="ernie4_5_moe", regions=(ATTENTION, MLP, SHARED_EXPERTS))
HUNYUAN_V1_MOE = replace(
    LLAMA,
    name="hunyuan_v1_moe",
    regions=(
        NORMED,
        replace(
            EXPERTS,
            column=("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"),
            row=("mlp.shared_mlp.down_proj",),
        ),
    ),
)
