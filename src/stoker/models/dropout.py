"""The dropout of a model, in its modules and in the rates of its configuration.

The noise of routers (Phi-3.5 MoE draws its experts at random) is dropout here.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

OTHER_HEADS = ("classifier_", "summary_")  # rates of GPT-NeoX, GPT-Neo and GPT-2, of heads that Stoker does not build


def has_dropout(model: nn.Module) -> bool:
    """Returns whether a model has dropout in training."""
    in_attention = any(getattr(config, name) for config in _configs(model) for name in _rates(config))
    return in_attention or any(isinstance(m, nn.Dropout) and m.p > 0 for m in model.modules())


def without_dropout(model: PreTrainedModel) -> None:
    """Switches off all dropout of a model."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for holder in (*_configs(model), *model.modules()):
        for name in _rates(holder):
            setattr(holder, name, 0.0)


def is_dropout_rate(name: str, value: object) -> bool:
    """Returns whether a number of a configuration is a rate of dropout in the model that Stoker builds."""
    return isinstance(value, float) and "drop" in name and not name.startswith(OTHER_HEADS)


def _configs(model: nn.Module) -> tuple[Any, ...]:
    """Returns a model's configuration, if it has one, and that of its text model, which may be a part of it."""
    config: Any = getattr(model, "config", None)
    return () if config is None else (config, config.get_text_config())


def _rates(holder: Any) -> list[str]:
    """Returns the attributes that are rates of dropout or of noise: attention functions take one as a number."""
    return [
        name
        for name, value in getattr(holder, "__dict__", {}).items()
        if is_dropout_rate(name, value) or (isinstance(value, float) and name.endswith("jitter_noise"))
    ]
