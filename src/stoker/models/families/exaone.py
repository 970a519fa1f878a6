"""EXAONE 4: LLaMA's blocks with norms of single heads, and norms after attention and MLP."""

from __future__ import annotations

from dataclasses import replace

from stoker.models.families.llama import LLAMA, MLP
from stoker.models.families.qwen import NORMED

EXAONE4 = replace(
    LLAMA, name="exaone4", regions=(NORMED, MLP), whole=("post_attention_layernorm", "post_feedforward_layernorm")
)
