"""Gemma 1 to 3 (text) and VaultGemma: LLaMA's blocks, more norms, tied heads; full and sliding attention in turn."""

from __future__ import annotations

from dataclasses import replace

from stoker.models.families.llama import LLAMA, MLP
from stoker.models.families.qwen import NORMED

GEMMA = replace(LLAMA, name="gemma")
GEMMA2 = replace(LLAMA, name="gemma2", whole=(*LLAMA.whole, "pre_feedforward_layernorm", "post_feedforward_layernorm"))
VAULTGEMMA = replace(LLAMA, name="vaultgemma", whole=("input_layernorm", "pre_feedforward_layernorm"))
GEMMA3 = replace(GEMMA2, name="gemma3_text", regions=(NORMED, MLP))
