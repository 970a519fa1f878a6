"""Fixtures of the model tests: documents to lay out, and arithmetic without rounding to float32."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from families import VOCABULARY
from stoker.models.attention.collate import Row


@pytest.fixture
def documents() -> list[Row]:
    """Five documents of uneven length with a part of their tokens trained; three of them begin alike."""
    generator = np.random.default_rng(1)
    rows = []
    for length in (24, 9, 31, 17, 12):
        ids = generator.integers(2, VOCABULARY, length).astype(np.uint32)
        trained = generator.random(length) < 0.6
        trained[-2] = True
        rows.append((ids, trained))
    for other in (2, 3):
        rows[other][0][:11] = rows[0][0][:11]
    return rows


@pytest.fixture
def no_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Families compute norms and softmaxes in float32, whatever their weights are; here they stay in float64.

    Rounding would hide a small leak between documents.
    """
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch, "float", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
