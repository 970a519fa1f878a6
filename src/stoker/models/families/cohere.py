"""Cohere (Command R, Command A): attention and MLP side by side after one norm, scaled logits."""

from __future__ import annotations

from dataclasses import replace

from stoker.models.families.llama import LLAMA

# The norms of single heads that its larger models have get no fact: they have a weight for every head, and such a
# model is refused.
COHERE = replace(LLAMA, name="cohere", whole=("input_layernorm",))
COHERE2 = replace(COHERE, name="cohere2")
