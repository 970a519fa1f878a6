"""AFMoE (Arcee's Trinity): gated attention, norms before and after attention and MLP, dense blocks first, then experts.

The embeddings may be multiplied by a factor, which the model's code applies to what enters the first block.
"""

from __future__ import annotations

from dataclasses import replace

from stoker.models.families.deepseek import SHARED_EXPERTS
from stoker.models.families.llama import LLAMA, MLP
from stoker.models.families.qwen import NORMED

AFMOE = replace(
    LLAMA,
    name="afmoe",
    regions=(
        replace(NORMED, column=(*NORMED.column, "self_attn.gate_proj")),
        MLP,
        replace(SHARED_EXPERTS, shared=("mlp.router",)),
    ),
    whole=(*LLAMA.whole, "pre_mlp_layernorm", "post_mlp_layernorm", "mlp.expert_bias"),
    input_factors=("model.config.mup_enabled",),
)
