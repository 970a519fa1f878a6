"""Scores of answers are compared by small differences."""

from __future__ import annotations

import torch
from torch import nn

from stoker.models.head import Head
from stoker.models.score_head import scores


def test_scores_of_gathered_weights_in_bfloat16_are_in_float32() -> None:
    linear = nn.Linear(4, 1, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        linear.weight.fill_(1.0)
    hidden_ND = torch.tensor([[2.0, 0.25, 0.0, 0.0], [2.0, 0.25, 0.001, 0.0]], dtype=torch.bfloat16)
    first, second = scores(hidden_ND, Head(linear))
    assert first.dtype == torch.float32 and float(second - first) > 9e-4
