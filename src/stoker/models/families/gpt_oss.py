"""gpt-oss: LLaMA's attention with a learnt sink for each head, and experts in every block."""

from __future__ import annotations

from dataclasses import replace

from stoker.models.families.facts import Region
from stoker.models.families.llama import ATTENTION, LLAMA

GPT_OSS = replace(
    LLAMA,
    name="gpt_oss",
    regions=(ATTENTION, Region(enter="mlp", experts="mlp.experts", shared=("mlp.router",))),
    per_head=("self_attn.sinks",),
)
