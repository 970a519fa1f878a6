"""Wide & Deep (Cheng et al., 2016, "Wide & Deep Learning for Recommender Systems", DLRS)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stoker.models.ranking.mlp import mlp
from stoker.models.ranking.model_inputs import FIRST_ORDER, RankingInputs, RankingShape, side_by_side


class WideDeep(nn.Module):
    """A linear model over the ids (crosses too) and the numbers, and a deep tower, trained together."""

    first_order, unpooled = True, False

    def __init__(self, shape: RankingShape) -> None:
        super().__init__()
        self.shape = shape
        self.wide = nn.Linear(shape.numbers, shape.labels) if shape.numbers else None
        self.bias = nn.Parameter(torch.zeros(shape.labels))
        self.deep = mlp(shape.inputs, shape.hidden, shape.labels)

    def forward(self, inputs: RankingInputs) -> Tensor:
        wide_B1 = sum(inputs.vectors[name + FIRST_ORDER] for name in self.shape.features)
        if self.wide is not None:
            wide_B1 = wide_B1 + self.wide(inputs.dense)
        return wide_B1 + self.deep(side_by_side(inputs, self.shape)) + self.bias
