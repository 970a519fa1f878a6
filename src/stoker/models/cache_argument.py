"""The argument by which a model's forward pass takes its cache of keys and values."""

from __future__ import annotations

from inspect import signature

from torch import nn

NAMES = ("cache", "past_key_values")
"""transformers' names of it: from 5.24 on, and before."""


def cache_argument(body: nn.Module) -> str | None:
    """Returns the argument's name; None if the model takes no such cache."""
    taken = signature(body.forward).parameters
    return next((name for name in NAMES if name in taken), None)
