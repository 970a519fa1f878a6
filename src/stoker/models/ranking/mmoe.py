"""MMoE (Ma et al., KDD 2018, "Modeling Task Relationships in Multi-task Learning with Multi-gate MoE")."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stoker.models.ranking.mlp import mlp
from stoker.models.ranking.model_inputs import RankingInputs, RankingShape, side_by_side


class MMoE(nn.Module):
    """Experts that all labels share, a gate of each label that weighs them, and a tower of each (equations 6 to 8)."""

    first_order, unpooled = False, False

    def __init__(self, shape: RankingShape) -> None:
        super().__init__()
        self.shape = shape
        *rest, last = shape.hidden
        between = rest or [last]
        self.experts = nn.ModuleList([mlp(shape.inputs, between) for _ in range(shape.experts)])
        self.gates = nn.ModuleList([nn.Linear(shape.inputs, shape.experts, bias=False) for _ in range(shape.labels)])
        self.towers = nn.ModuleList([mlp(between[-1], [last], 1) for _ in range(shape.labels)])

    def forward(self, inputs: RankingInputs) -> Tensor:
        rows = side_by_side(inputs, self.shape)
        experts_BEH = torch.stack([expert(rows) for expert in self.experts], dim=1)
        mixed = [(gate(rows).softmax(1)[:, :, None] * experts_BEH).sum(1) for gate in self.gates]
        return torch.cat([tower(own) for tower, own in zip(self.towers, mixed, strict=True)], dim=1)
