"""Two towers (Yi et al., 2019, "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations",
RecSys): a vector of the user, a vector of the item, and their cosine over a temperature.

It is trained with the cross entropy of each row, not with the paper's in-batch softmax and its logQ correction.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from stoker.models.ranking.mlp import mlp
from stoker.models.ranking.model_inputs import RankingInputs, RankingShape

TEMPERATURE = 0.1  # at the start; it is learnt


class TwoTower(nn.Module):
    """The score of a row is its user's vector times its item's, so items can be searched for a user.

    Numbers are the user's.
    """

    first_order, unpooled = False, False

    def __init__(self, shape: RankingShape) -> None:
        super().__init__()
        self.shape = shape
        self.of_user = tuple(name for name in shape.features if name not in shape.item)
        last = shape.width
        self.user = mlp(sum(map(shape.width_of, self.of_user)) + shape.numbers, shape.hidden, last)
        self.item = mlp(sum(map(shape.width_of, shape.item)), shape.hidden, last)
        self.log_scale = nn.Parameter(torch.full((shape.labels,), -math.log(TEMPERATURE)))
        self.bias = nn.Parameter(torch.zeros(shape.labels))

    def user_vectors(self, inputs: RankingInputs) -> Tensor:
        """Returns the users' vectors of length 1, [B, D]."""
        parts = [*(inputs.vectors[name] for name in self.of_user), inputs.dense]
        return normalize(self.user(torch.cat(parts, dim=1)), dim=1)

    def item_vectors(self, inputs: RankingInputs) -> Tensor:
        """Returns the items' vectors of length 1, [B, D]."""
        return normalize(self.item(torch.cat([inputs.vectors[name] for name in self.shape.item], dim=1)), dim=1)

    def forward(self, inputs: RankingInputs) -> Tensor:
        cosine_B1 = (self.user_vectors(inputs) * self.item_vectors(inputs)).sum(1, keepdim=True)
        return cosine_B1 * self.log_scale.exp() + self.bias
