"""Granite: LLaMA's blocks with constant factors on embeddings, residuals, scores and logits."""

from __future__ import annotations

from dataclasses import replace

from stoker.models.families.llama import LLAMA

GRANITE = replace(LLAMA, name="granite", input_factors=("model.embedding_multiplier",))
