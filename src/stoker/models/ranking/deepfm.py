"""DeepFM (Guo et al., 2017, "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction", IJCAI)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stoker.models.ranking.common_width import CommonWidth
from stoker.models.ranking.mlp import mlp
from stoker.models.ranking.model_inputs import FIRST_ORDER, RankingInputs, RankingShape, side_by_side


class DeepFM(nn.Module):
    """A factorization machine and a deep tower over the same vectors; numbers have separate weights."""

    first_order, unpooled = True, False

    def __init__(self, shape: RankingShape) -> None:
        super().__init__()
        self.shape = shape
        self.linear = nn.Linear(shape.numbers, shape.labels) if shape.numbers else None
        self.vectors = CommonWidth(shape)
        self.bias = nn.Parameter(torch.zeros(shape.labels))
        self.deep = mlp(shape.inputs, shape.hidden, shape.labels)

    def forward(self, inputs: RankingInputs) -> Tensor:
        once_B1 = sum(inputs.vectors[name + FIRST_ORDER] for name in self.shape.features)
        if self.linear is not None:
            once_B1 = once_B1 + self.linear(inputs.dense)
        vectors_BFD = self.vectors(inputs)
        # The sum over pairs of <v_i, v_j>, equation 3 of Rendle (2010), "Factorization Machines".
        pairs_B = (vectors_BFD.sum(1).square() - vectors_BFD.square().sum(1)).sum(1) / 2
        return once_B1 + pairs_B[:, None] + self.deep(side_by_side(inputs, self.shape)) + self.bias
