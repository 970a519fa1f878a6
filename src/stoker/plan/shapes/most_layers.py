"""The most layers that a model can have, by the names of its weights."""

from __future__ import annotations

from collections.abc import Iterable

MOST_LAYERS = 10_000  # each is built in Python, even without memory for its weights


def most_layers(names: Iterable[str]) -> int:
    """Returns the largest number in names such as ``model.layers.3.mlp.up_proj.weight``, plus one.

    Without a number in them, any model's limit.
    """
    parts = {part for name in names for part in name.split(".")}
    return max((int(part) + 1 for part in parts if part.isdecimal() and len(part) < 10), default=MOST_LAYERS)
