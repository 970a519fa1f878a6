"""A language model as the module that is called for a forward pass, in one process and in many."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor, nn

from stoker.models.attention.collate import Inputs
from stoker.models.language_model import LanguageModel
from stoker.models.objective import Loss, Objective, Reading

T = TypeVar("T")


class CausalLoss(nn.Module):
    """A causal language model whose forward pass ends in the loss; without pipeline stages.

    The loss is inside, as sharded weights of the head are gathered for this forward pass only. A separate critic is
    another such module, which computes instead while it is at work.
    """

    def __init__(self, language: LanguageModel, objective: Objective) -> None:
        super().__init__()
        self.model, self.language, self.objective = language.model, language, objective
        self.critic = CausalLoss(language.critic.language, objective) if language.critic is not None else None

    def forward(self, inputs: Inputs | Callable[[], T], *, reading: Reading | None = None) -> Loss | tuple[Tensor] | T:
        """Computes the `Loss` of this process' targets.

        Args:
            inputs: the inputs, or a function that is called while the weights are gathered; its result is returned.
            reading: returns (its reading) instead.
        """
        if not isinstance(inputs, Inputs):
            return inputs()
        if self.language.critic is not None and self.language.critic.at_work:
            assert self.critic is not None
            found: Loss | tuple[Tensor] = self.critic(inputs, reading=reading)
            return found
        return (self.language.read(inputs, reading),) if reading else self.language.loss(inputs, self.objective)
