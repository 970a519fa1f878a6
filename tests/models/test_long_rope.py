"""LongRoPE by document: the result of a document does not depend on those beside it."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from test_packed_attention import BOUND, farthest_gradient, laid_out_loss, own_loss

from families import tiny
from stoker.models.attention.collate import Row
from stoker.models.attention.long_rope import document_lengths
from stoker.models.language_model import lay_out_for
from stoker.models.prepare_architecture import training_form

ORIGINAL = 20  # tokens; the test's documents have 9 to 31
SIZE = {"phi3": 4, "phimoe": 4}


def model_of(family: str) -> Any:
    half = SIZE[family]
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0] * half,
        "long_factor": [1.5 + i for i in range(half)],
        "original_max_position_embeddings": ORIGINAL,
    }
    if family == "phimoe":
        rope |= {"short_mscale": 1.0, "long_mscale": 1.3}
    lengths = {"max_position_embeddings": 64, "original_max_position_embeddings": ORIGINAL}
    return tiny(family, rope_parameters=rope, **lengths).eval()


@pytest.mark.parametrize("family", SIZE)
@pytest.mark.usefixtures("no_float32")
def test_documents_together_give_the_sum_of_the_documents(family: str, documents: list[Row]) -> None:
    model = model_of(family)
    reference = copy.deepcopy(model)
    expected = own_loss(reference, documents)  # transformers' own, each document alone
    expected.backward()
    plain = laid_out_loss(lay_out_for(copy.deepcopy(model)), documents)
    assert plain != pytest.approx(float(expected.detach()), rel=1e-6)  # the longest document decides

    training_form(model)
    model.zero_grad()
    language = lay_out_for(model)
    total = laid_out_loss(language, documents)
    assert language.packs
    assert total == pytest.approx(float(expected.detach()), rel=BOUND)
    if family == "phimoe":  # its parameters keep their names in training
        assert farthest_gradient(model, reference) < BOUND


def test_lengths_of_documents_in_rows() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 0, 1], [5, 6, 0, 1, 2, 3]])
    assert document_lengths(positions).tolist() == [[3, 3, 3, 1, 2, 2], [7, 7, 4, 4, 4, 4]]
    alone = torch.from_numpy(np.arange(9))[None]
    assert document_lengths(alone).unique().tolist() == [9]
