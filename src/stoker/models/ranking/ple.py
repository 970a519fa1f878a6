"""PLE (Tang et al., RecSys 2020, "Progressive Layered Extraction (PLE): A Novel Multi-Task Learning Model for
Personalized Recommendations").
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from stoker.models.ranking.mlp import mlp
from stoker.models.ranking.model_inputs import RankingInputs, RankingShape, side_by_side


class Level(nn.Module):
    """Experts of each label and shared ones. The gate of a label weighs its own and the shared experts (CGC, section
    4.1); the shared gate weighs all of them (section 4.2).

    Args:
        outputs: widths of an expert's layers.
        last: whether it is the last level, which has no shared gate.
    """

    def __init__(self, inputs: int, outputs: Sequence[int], shape: RankingShape, *, last: bool) -> None:
        super().__init__()
        self.count, groups = shape.experts, shape.labels + 1
        self.experts = nn.ModuleList(mlp(inputs, outputs) for _ in range(groups * self.count))  # the shared ones last
        weighed = [2 * self.count] * shape.labels + ([] if last else [groups * self.count])
        self.gates = nn.ModuleList(nn.Linear(inputs, count, bias=False) for count in weighed)

    def forward(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Maps an input of each label and a shared one, each [B, D], to the next ones, without a shared one if this is
        the last level.
        """
        experts_BEH = torch.stack([expert(inputs[n // self.count]) for n, expert in enumerate(self.experts)], dim=1)
        *own, shared = experts_BEH.split(self.count, dim=1)
        weighed = [*(torch.cat([each, shared], dim=1) for each in own), experts_BEH]
        gates = zip(self.gates, inputs, weighed, strict=False)
        return [(gate(each)[:, :, None].softmax(1) * experts).sum(1) for gate, each, experts in gates]


class PLE(nn.Module):
    """Levels of experts, each fed with the mixtures of the one before, and a tower of each label."""

    first_order, unpooled = False, False

    def __init__(self, shape: RankingShape) -> None:
        super().__init__()
        self.shape = shape
        *rest, last = shape.hidden
        between = rest or [last]
        widths = [shape.inputs] + [between[-1]] * (shape.levels - 1)
        self.levels = nn.ModuleList(
            Level(width, between, shape, last=number == shape.levels) for number, width in enumerate(widths, 1)
        )
        self.towers = nn.ModuleList(mlp(between[-1], [last], 1) for _ in range(shape.labels))

    def forward(self, inputs: RankingInputs) -> Tensor:
        mixed = [side_by_side(inputs, self.shape)] * (self.shape.labels + 1)
        for level in self.levels:
            mixed = level(mixed)
        return torch.cat([tower(own) for tower, own in zip(self.towers, mixed, strict=True)], dim=1)
