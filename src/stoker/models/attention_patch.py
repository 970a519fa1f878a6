"""Attention through transformers' interface, for families whose code writes it out.

Such a family's file replaces, on the model at hand, the method that computes attention. With the
implementation ``eager`` it does what it always did; with any other, such as packed attention, it asks that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


def interface_of(config: Any) -> Callable[..., Any] | None:
    """The attention function that a model is set to; None for ``eager``, its own."""
    name = config._attn_implementation
    return None if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]


def attend_through(model: nn.Module, blocks: str) -> Iterator[nn.Module]:
    """Lets the model's attention implementation be set, and gives its blocks.

    Args:
        blocks: path of the module list.
    """
    model._can_set_attn_implementation = _yes  # type: ignore[assignment]  # transformers judges by the source
    yield from model.get_submodule(blocks).children()


def _yes() -> bool:
    return True
