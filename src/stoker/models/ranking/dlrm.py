"""DLRM (Naumov et al., 2019, "Deep Learning Recommendation Model for Personalization and Recommendation Systems")."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stoker.models.ranking.common_width import CommonWidth
from stoker.models.ranking.mlp import mlp
from stoker.models.ranking.model_inputs import RankingInputs, RankingShape


class DLRM(nn.Module):
    """Numbers through a bottom tower to a vector; dot products of all pairs of vectors; a top tower over both."""

    first_order, unpooled = False, False
    pairs: Tensor

    def __init__(self, shape: RankingShape) -> None:
        super().__init__()
        self.shape = shape
        self.vectors = CommonWidth(shape)
        self.bottom = mlp(shape.numbers, [*shape.hidden[:1], shape.width]) if shape.numbers else None
        vectors = len(shape.features) + (shape.numbers > 0)
        self.register_buffer("pairs", torch.tril_indices(vectors, vectors, -1), persistent=False)
        beside = shape.width if shape.numbers else 0
        self.top = mlp(beside + vectors * (vectors - 1) // 2, shape.hidden, shape.labels)

    def forward(self, inputs: RankingInputs) -> Tensor:
        vectors_BFD = self.vectors(inputs)
        beside = []
        if self.bottom is not None:
            dense_BD = self.bottom(inputs.dense)
            vectors_BFD = torch.cat([dense_BD[:, None], vectors_BFD], dim=1)
            beside = [dense_BD]
        products_BFF = vectors_BFD @ vectors_BFD.transpose(1, 2)
        first, second = self.pairs.unbind()
        return self.top(torch.cat([*beside, products_BFF[:, first, second]], dim=1))
