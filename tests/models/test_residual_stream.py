"""The residual stream under autocast: bfloat16 where products are, in all families."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from families import tiny
from stoker.models.attention import packed_row
from stoker.models.blocks import blocks_of
from stoker.models.language_model import lay_out_for
from stoker.models.prepare_architecture import training_form


def trained(family: str, low: torch.dtype | None) -> tuple[set[torch.dtype], Tensor]:
    """The dtypes that enter the blocks, and the gradient of all parameters."""
    model: Any = tiny(family, dtype=torch.float32)
    training_form(model)
    language = lay_out_for(model)
    entered = set()
    for block in blocks_of(model):
        block.register_forward_pre_hook(lambda _, arguments: entered.add(arguments[0].dtype))
    ids = np.random.default_rng(0).integers(2, 100, 30).astype(np.uint32)
    (inputs,) = language.lay_out([(ids, np.ones(len(ids), bool))], torch.device("cpu"))
    with torch.autocast("cpu", low or torch.bfloat16, enabled=low is not None), packed_row.row_of(inputs):
        loss = language.loss(inputs).total
    loss.backward()
    return entered, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


# Positions are added, embeddings scaled or normalised, norms at the end of blocks, and no family's facts.
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "bloom", "glm4", "falcon"])
def test_blocks_add_to_bfloat16_and_gradients_stay_near_float32(family: str) -> None:
    exact_types, exact = trained(family, None)
    types, gradient = trained(family, torch.bfloat16)
    assert (exact_types, types) == ({torch.float32}, {torch.bfloat16})
    assert float((gradient - exact).norm() / exact.norm()) < 3e-2


def test_under_float16_it_stays_float32() -> None:
    assert trained("llama", torch.float16)[0] == {torch.float32}
