"""The dropout of a model, in its modules and in the rates of its configuration."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel


def has_dropout(model: nn.Module) -> bool:
    """Returns whether a model has dropout in training."""
    config = getattr(model, "config", None)
    in_attention = any(getattr(config, name) for name in _rates(config))
    return in_attention or any(isinstance(m, nn.Dropout) and m.p > 0 for m in model.modules())


def without_dropout(model: PreTrainedModel) -> None:
    """Switches off all dropout of a model."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for holder in (model.config, model.config.get_text_config(), *model.modules()):
        for name in _rates(holder):
            setattr(holder, name, 0.0)


def _rates(holder: Any) -> list[str]:
    """Returns the attributes that are rates of dropout: attention functions take one as a number."""
    return [
        name for name, value in getattr(holder, "__dict__", {}).items() if "drop" in name and isinstance(value, float)
    ]
