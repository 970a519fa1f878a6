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
    """

    prompts: int
    answers: int
    tokens: int
    epochs: int
    readings: int
    replies: bool = False
