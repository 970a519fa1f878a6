"""Sizes of the rounds of answers that a policy's steps train on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RolloutSizes:
    """Sizes of a round of answers.

    Attributes:
        prompts: prompts of a round.
        answers: answers to each.
        tokens: most tokens of an answer.
        epochs: passes of training over them.
        readings: forward passes without gradients over all answers before training on them.
        replies: whether an environment replies to the model's turns.
        scored_in_training: whether the passes of the step score the answers by the policy.
        reference: whether the initial model scores them.
        idle_on_host: whether the optimizer's states are on the host while answers are sampled.
    """

    prompts: int
    answers: int
    tokens: int
    epochs: int
    readings: int
    replies: bool = False
    scored_in_training: bool = False
    reference: bool = False
    idle_on_host: bool = False
