"""A critic for a policy: estimates the value of an answer at each of its tokens.

It shares the policy's base: with LoRA it has a separate adapter, else it is the policy's own body, with a linear layer
with one output above the last hidden states. Or it is a separate model with a score head, such as a reward model.
Shapes: N positions, D width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from stoker.models.head import OWN_CRITIC, VALUE_HEAD, Head, LogitsHead
from stoker.models.language_model import LanguageModel
from stoker.models.meta_model import META
from stoker.models.score_head import OFFSET, draw_weights, one_output, score_head_of, scores
from stoker.models.tuning.adapters import unwrap
from stoker.models.tuning.virtual_tokens import Drawn
from stoker.models.weight_source import Rows, WeightSource

CRITIC = "critic"
"""The name of its adapter."""


def add_critic(model: nn.Module, seed: int) -> Drawn:
    """Adds a critic, on the meta device; returns the initial values of its parameters outside of adapters.

    The layer's weights are drawn with a deviation of 1/sqrt(D + 1) (Huang et al., 2024, "The N+ Details", 11).
    """
    base = unwrap(model)
    if isinstance(model, PeftModel):
        config: Any = deepcopy(model.peft_config["default"])
        config.modules_to_save, config.ensure_weight_tying = None, False  # the policy's; peft would wrap them
        with torch.device(META):  # peft moves an adapter to its base's device only if it is the first
            model.add_adapter(CRITIC, config)
        for name, parameter in model.named_parameters():
            if is_of_critic(name):
                parameter.requires_grad_(True)
    width = int(base.config.get_text_config().hidden_size)
    head = nn.Linear(width, 1, device=META)
    setattr(base, VALUE_HEAD, head)
    name = next(name for name, module in model.named_modules() if module is head)
    return {f"{name}.weight": partial(draw_weights, width, seed, CRITIC), f"{name}.bias": partial(torch.zeros, 1)}


def is_of_critic(name: str) -> bool:
    """Returns whether a parameter of a policy's model is its critic's: of its adapter, its head, or its own model."""
    return not {CRITIC, VALUE_HEAD, OWN_CRITIC}.isdisjoint(name.split("."))


def remove_critic(model: nn.Module) -> None:
    """Leaves the policy alone."""
    if isinstance(model, PeftModel):
        model.delete_adapter(CRITIC)
    delattr(unwrap(model), VALUE_HEAD)


@dataclass(frozen=True)
class WithCritic:
    """Weights of a policy and of its separate critic, by the names in the policy's model."""

    policy: WeightSource
    critic: WeightSource

    def read(self, name: str, rows: Rows) -> Tensor:
        """See `WeightSource`."""
        inside = name.removeprefix(f"{OWN_CRITIC}.")
        return self.policy.read(name, rows) if inside == name else self.critic.read(inside, rows)


def attach_critic(model: nn.Module, weights: WeightSource, critic: nn.Module, source: WeightSource) -> WithCritic:
    """Makes a critic a part of the policy's model, so that it is optimized and saved with it; returns their weights.

    It must come after every search for blocks or layers of the policy.
    """
    model.add_module(OWN_CRITIC, critic)
    return WithCritic(weights, source)


@contextmanager
def as_critic(language: LanguageModel) -> Iterator[None]:
    """A context in which the critic computes: the separate model, or the policy's with the critic's adapter.

    It does not change which parameters are trained.
    """
    if language.critic is not None:
        language.critic.at_work = True
        try:
            yield
        finally:
            language.critic.at_work = False
        return
    layers = [layer for layer in language.model.modules() if isinstance(layer, BaseTunerLayer)]
    before = [layer._active_adapter for layer in layers]
    try:
        for layer in layers:
            layer._active_adapter = [CRITIC]
        yield
    finally:
        for layer, active in zip(layers, before, strict=True):
            layer._active_adapter = active


def values(hidden_ND: Tensor, language: LanguageModel, head: Head | LogitsHead) -> Tensor:
    """Returns the value at each position, in float32 at least, shape (N,).

    Args:
        language: the policy, which has the critic.
        head: of the model that is computing.
    """
    if language.critic is not None:
        score_head = score_head_of(language.critic.language.model)
        return scores(hidden_ND, head) - getattr(score_head, OFFSET)
    layer = language.model.get_submodule(VALUE_HEAD)
    assert isinstance(layer, nn.Linear)
    return one_output(hidden_ND, layer, head.across if isinstance(head, Head) else None)
