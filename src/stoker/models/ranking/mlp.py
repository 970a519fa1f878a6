"""A tower of linear layers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def mlp(inputs: int, hidden: Sequence[int], outputs: int | None = None) -> nn.Sequential:
    """Linear layers with ReLU between them.

    Args:
        hidden: widths, each followed by ReLU.
        outputs: width of a last linear layer; None for none.
    """
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [nn.Linear(inputs, width), nn.ReLU()]
        inputs = width
    if outputs is not None:
        layers.append(nn.Linear(inputs, outputs))
    return nn.Sequential(*layers)
