"""Hunyuan (dense): LLaMA's blocks with norms of single heads."""

from __future__ import annotations

from dataclasses import replace

from stoker.models.families.llama import ATTENTION, LLAMA, MLP

NORMED = replace(ATTENTION, shared=("self_attn.query_layernorm", "self_attn.key_layernorm"))

HUNYUAN = replace(LLAMA, name="hunyuan_v1_dense", regions=(NORMED, MLP))
