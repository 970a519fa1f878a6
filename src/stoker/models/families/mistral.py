"""Mistral and Mixtral: LLaMA's blocks with a sliding window, or with experts in place of the MLP."""

from __future__ import annotations

from dataclasses import replace

from stoker.models.families.facts import Region
from stoker.models.families.llama import ATTENTION, LLAMA

# The router chooses among all experts on every process; a process weights the outputs of its own only.
EXPERTS = Region(enter="mlp", experts="mlp.experts", shared=("mlp.gate",))

MISTRAL = replace(LLAMA, name="mistral")
MIXTRAL = replace(LLAMA, name="mixtral", regions=(ATTENTION, EXPERTS))
