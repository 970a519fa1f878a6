"""Projects vectors of several widths to one (Ginart et al., 2021, "Mixed Dimension Embeddings", ISIT): a linear map,
without a bias, for each feature whose vectors have another width.
"""

from __future__ import annotations

from torch import Tensor, nn, stack

from stoker.models.ranking.model_inputs import RankingInputs, RankingShape


class CommonWidth(nn.Module):
    """The vectors of each row, [B, F, D], all of `RankingShape.width` numbers."""

    def __init__(self, shape: RankingShape) -> None:
        super().__init__()
        self.shape = shape
        others = [(n, shape.width_of(name)) for n, name in enumerate(shape.features) if name in shape.widths]
        self.maps = nn.ModuleDict({str(n): nn.Linear(width, shape.width, bias=False) for n, width in others})

    def forward(self, inputs: RankingInputs) -> Tensor:
        vectors = [inputs.vectors[name] for name in self.shape.features]
        for number, linear in self.maps.items():
            vectors[int(number)] = linear(vectors[int(number)])
        return stack(vectors, dim=1)
