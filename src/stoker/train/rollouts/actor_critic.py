"""Losses of a policy and its critic, each in its own forward passes."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from stoker.models.attention.collate import Inputs
from stoker.models.critic import values
from stoker.models.head import Head, LogitsHead
from stoker.models.language_model import LanguageModel
from stoker.models.objective import Loss, Measures
from stoker.train.rollouts.policy_objective import PolicyObjective

RETURN = "return"  # given to passes of the critic, not to those of the policy


@dataclass
class ActorCritic:
    """The policy's loss in its passes, and in those of the critic

        weight / 2 * max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2)

    (as PPO's reference implementation has it; Huang et al., 2022, detail 9). Shapes: N answer tokens.

    Attributes:
        value_clip: c; None for no clipping.
        weight: weight of the critic's loss.
        language: the model with the critic.
    """

    policy: PolicyObjective
    value_clip: float | None
    weight: float
    language: LanguageModel | None = None
    measures: Measures = field(init=False)

    def __post_init__(self) -> None:
        self.measures = self.policy.measures

    def __call__(self, hidden_ND: Tensor, inputs: Inputs, head: Head | LogitsHead) -> Loss:
        """See `stoker.models.objective.Objective`. A pass of the critic is given ``return``, ``value`` and ``weight``
        by target."""
        if RETURN not in inputs.given:
            return self.policy(hidden_ND, inputs, head)
        assert self.language is not None
        value_N = values(hidden_ND, self.language, head)
        old_N, return_N, weight_N = (inputs.given[name].to(value_N) for name in ("value", RETURN, "weight"))
        plain_N = error_N = (value_N - return_N).square()
        if self.value_clip is not None:
            clipped_N = torch.minimum(torch.maximum(value_N, old_N - self.value_clip), old_N + self.value_clip)
            error_N = torch.maximum(error_N, (clipped_N - return_N).square())
        loss = (weight_N * error_N).sum() / 2
        self.measures.add(inputs, value_loss=loss, value_clip_fraction=(error_N > plain_N).to(loss).sum())
        return Loss(self.weight * loss, None)


@dataclass(frozen=True)
class ValueReading:
    """A `stoker.models.objective.Reading` of the critic's value before each target, shape (1, N)."""

    language: LanguageModel

    def __call__(self, hidden_ND: Tensor, inputs: Inputs, head: Head | LogitsHead) -> Tensor:
        return values(hidden_ND, self.language, head)[None]
