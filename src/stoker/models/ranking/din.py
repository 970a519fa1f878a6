"""DIN (Zhou et al., 2018, "Deep Interest Network for Click-Through Rate Prediction", KDD)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stoker.models.ranking.mlp import mlp
from stoker.models.ranking.model_inputs import RankingInputs, RankingShape, side_by_side

UNIT = (36,)  # hidden width of an activation unit, as in the paper's figure 2


class DIN(nn.Module):
    """Pools sequences by an activation unit, which weights each id by its relevance to the row's item (equation 3).

    The weights are not normalised by softmax, so that the intensity of an interest is preserved (section 4.3).
    """

    first_order, unpooled = False, True

    def __init__(self, shape: RankingShape) -> None:
        super().__init__()
        self.shape = shape
        widths = [shape.width_of(name) for name in shape.sequences]
        self.units = nn.ModuleDict({str(number): mlp(4 * width, UNIT, 1) for number, width in enumerate(widths)})
        self.top = mlp(shape.inputs + sum(widths), shape.hidden, shape.labels)

    def forward(self, inputs: RankingInputs) -> Tensor:
        interests = [
            self._interest(unit, inputs.vectors[sequence], inputs.vectors[item], inputs.lengths[sequence])
            for unit, (sequence, item) in zip(self.units.values(), self.shape.sequences.items(), strict=True)
        ]
        return self.top(torch.cat([side_by_side(inputs, self.shape), *interests], dim=1))

    def _interest(self, unit: nn.Module, vectors_BLD: Tensor, item_BD: Tensor, lengths_B: Tensor) -> Tensor:
        item_BLD = item_BD[:, None].expand_as(vectors_BLD)
        pairs = torch.cat([vectors_BLD, item_BLD, vectors_BLD - item_BLD, vectors_BLD * item_BLD], dim=2)
        there_BL = torch.arange(vectors_BLD.shape[1], device=lengths_B.device) < lengths_B[:, None]
        weights_BL = unit(pairs)[:, :, 0] * there_BL
        return (weights_BL[:, :, None] * vectors_BLD).sum(1)
