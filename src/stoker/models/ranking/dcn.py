"""DCN-V2 (Wang et al., 2021, "DCN V2: Improved Deep & Cross Network", WWW), the parallel form."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stoker.models.ranking.mlp import mlp
from stoker.models.ranking.model_inputs import RankingInputs, RankingShape, side_by_side


class DCN(nn.Module):
    """Cross layers ``x_{l+1} = x_0 * (W_l x_l + b_l) + x_l`` (equation 1) in parallel with a deep tower."""

    first_order, unpooled = False, False

    def __init__(self, shape: RankingShape) -> None:
        super().__init__()
        self.shape = shape
        self.crosses = nn.ModuleList([nn.Linear(shape.inputs, shape.inputs) for _ in range(shape.layers)])
        self.deep = mlp(shape.inputs, shape.hidden)
        self.head = nn.Linear(shape.inputs + shape.hidden[-1], shape.labels)

    def forward(self, inputs: RankingInputs) -> Tensor:
        first = crossed = side_by_side(inputs, self.shape)
        for cross in self.crosses:
            crossed = first * cross(crossed) + crossed
        return self.head(torch.cat([crossed, self.deep(first)], dim=1))
