"""Two towers (Yi et al., 2019, "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations",
RecSys): a vector of the user, a vector of the item, and their cosine over a temperature.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from stoker.models.ranking.item_frequencies import ItemFrequencies
from stoker.models.ranking.mlp import mlp
from stoker.models.ranking.model_inputs import RankingInputs, RankingShape

TEMPERATURE = 0.1  # at the start; it is learnt


class TwoTower(nn.Module):
    """The score of a row is its user's vector times its item's, so items can be searched for a user.

    Numbers are the user's.

    Attributes:
        frequencies: of the items, for the logQ correction of the in-batch softmax; None without it.
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
        self.frequencies: ItemFrequencies | None = None

    def user_vectors(self, inputs: RankingInputs) -> Tensor:
        """Returns the users' vectors of length 1, [B, D]."""
        parts = [*(inputs.vectors[name] for name in self.of_user), inputs.dense]
        return normalize(self.user(torch.cat(parts, dim=1)), dim=1)

    def item_vectors(self, inputs: RankingInputs) -> Tensor:
        """Returns the items' vectors of length 1, [B, D]."""
        return normalize(self.item(torch.cat([inputs.vectors[name] for name in self.shape.item], dim=1)), dim=1)

    def forward(self, inputs: RankingInputs, *, apart: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Returns the logits [B, 1]; with ``apart`` the users' vectors over the temperature, and the items' vectors."""
        users_BD, items_BD = self.user_vectors(inputs), self.item_vectors(inputs)
        if apart:
            return users_BD * self.log_scale.exp(), items_BD
        return (users_BD * items_BD).sum(1, keepdim=True) * self.log_scale.exp() + self.bias
