"""Granite, dense or with experts: LLaMA's blocks with constant factors on embeddings, residuals, scores and logits."""

from __future__ import annotations

from dataclasses import replace

from stoker.models.families.facts import Region
from stoker.models.families.llama import ATTENTION, LLAMA

GRANITE = replace(LLAMA, name="granite", input_factors=("model.embedding_multiplier",))
GRANITEMOE = replace(
    GRANITE,
    name="granitemoe",
    regions=(
        ATTENTION,
        Region(enter="block_sparse_moe", experts="block_sparse_moe.experts", shared=("block_sparse_moe.router",)),
    ),
)
