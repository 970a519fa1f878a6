"""ESMM (Ma et al., SIGIR 2018, "Entire Space Multi-Task Model: An Effective Approach for Estimating Post-Click
Conversion Rate").
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stoker.models.ranking.mlp import mlp
from stoker.models.ranking.model_inputs import RankingInputs, RankingShape, side_by_side


class ESMM(nn.Module):
    """Towers of a click and of a conversion given a click. Their product, the probability of both, is trained on all
    rows instead of the second tower on the clicked ones (section 2.3).

    The logits [B, 3] are of the click, of both, and of the conversion given a click.
    """

    first_order, unpooled = False, False

    def __init__(self, shape: RankingShape) -> None:
        super().__init__()
        self.shape = shape
        self.click = mlp(shape.inputs, shape.hidden, 1)
        self.conversion = mlp(shape.inputs, shape.hidden, 1)

    def forward(self, inputs: RankingInputs) -> Tensor:
        rows = side_by_side(inputs, self.shape)
        click_B1, conversion_B1 = self.click(rows), self.conversion(rows)
        return torch.cat([click_B1, logit_of_both(click_B1, conversion_B1), conversion_B1], dim=1)


def logit_of_both(a: Tensor, b: Tensor) -> Tensor:
    """Returns the logit of p q, where a and b are the logits of p and q: the odds against it are
    (1 + exp(-a)) (1 + exp(-b)) - 1 = exp(-a) + exp(-b) + exp(-a - b).
    """
    wide = torch.promote_types(a.dtype, torch.float32)
    a, b = a.to(wide), b.to(wide)
    return -torch.stack([-a, -b, -a - b]).logsumexp(0)
