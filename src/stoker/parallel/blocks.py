"""The repeated blocks of a model, which recompute and compile are applied to."""

from __future__ import annotations

from torch import nn


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The members of the module list that holds the most parameters; empty where there is no such list."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    largest = max(lists, key=lambda blocks: sum(p.numel() for p in blocks.parameters()), default=None)
    return list(largest) if largest is not None else []
