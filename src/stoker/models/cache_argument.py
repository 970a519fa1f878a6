"""The cache of a model's forward pass: its argument, and the layers that keep more than keys and values in it."""

from __future__ import annotations

from inspect import signature
from typing import Any

from torch import nn
from transformers.cache_utils import DynamicCache, DynamicIndexedLayer, LinearAttentionLayer

NAMES = ("cache", "past_key_values")
"""transformers' names of it: from 5.24 on, and before."""


def cache_argument(body: nn.Module) -> str | None:
    """Returns the argument's name; None if the model takes no such cache."""
    taken = signature(body.forward).parameters
    return next((name for name in NAMES if name in taken), None)


def state_layers(config: Any) -> frozenset[int]:
    """Returns the numbers of the layers that carry a state along a row (linear attention) instead of keys and values.

    Args:
        config: transformers' configuration of the model.
    """
    layers = DynamicCache(config=config).layers
    return frozenset(number for number, layer in enumerate(layers) if isinstance(layer, LinearAttentionLayer))


def indexed_layers(config: Any) -> tuple[int, ...]:
    """Returns the numbers of the layers that keep keys of an indexer as well (DeepSeek V3.2).

    Args:
        config: transformers' configuration of the model.
    """
    layers, kinds = DynamicCache(config=config).layers, getattr(config.get_text_config(), "indexer_types", None)
    indexed = (number for number, layer in enumerate(layers) if isinstance(layer, DynamicIndexedLayer))
    return tuple(number for number in indexed if kinds is None or kinds[number] == "full")
