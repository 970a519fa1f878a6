"""The repeated blocks of a model, to which recompute and compile are applied."""

from __future__ import annotations

from torch import nn


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Returns the members of the module list with the most parameters; empty if there is no such list."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    largest = max(lists, key=lambda blocks: sum(p.numel() for p in blocks.parameters()), default=None)
    return list(largest) if largest is not None else []
