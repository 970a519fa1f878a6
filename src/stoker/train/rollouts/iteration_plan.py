"""Assignment of answers to training steps.

The samples of a run of ``ppo`` or ``grpo`` are answers: those of iteration 0, once per epoch over them, then those of
iteration 1, and so on. The prompt, epoch and answer of a sample number are computed, not stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import numpy as np

from stoker.data.order import permute, stream_key


@dataclass(frozen=True)
class IterationPlan:
    """Sizes of an iteration.

    Attributes:
        prompts: prompts per iteration.
        answers: answers per prompt.
        epochs: passes over the answers of an iteration.
        batch: answers per optimizer step.
        seed: seed of the order within an epoch.
    """

    prompts: int
    answers: int
    epochs: int
    batch: int
    seed: int

    @property
    def rollouts(self) -> int:
        """Answers of an iteration."""
        return self.prompts * self.answers

    @property
    def samples(self) -> int:
        """Samples of an iteration: its answers in every epoch."""
        return self.rollouts * self.epochs

    def total(self, prompts: int) -> int:
        """Returns the samples that a number of prompts gives; the last iteration may have fewer."""
        whole, rest = divmod(prompts, self.prompts)
        return whole * self.samples + rest * self.answers * self.epochs

    def place(self, sample: int) -> tuple[int, int]:
        """Returns (iteration, index within it) of a sample."""
        return divmod(sample, self.samples)

    def order(self, iteration: int, epoch: int, rollouts: int) -> np.ndarray:
        """Returns the answers of an iteration in the order of an epoch, shape (rollouts,).

        The answers to a prompt stay together where a step takes whole groups, as they share the prompt's forward pass.
        A single step on all answers keeps their order.
        """
        if self.batch >= rollouts:
            return np.arange(rollouts)
        unit = self.answers if self.batch % self.answers == 0 else 1
        units = ceil(rollouts / unit)
        shuffled = permute(np.arange(units), units, stream_key(self.seed, 11, iteration, epoch))
        return (shuffled.astype(np.int64)[:, None] * unit + np.arange(unit)).reshape(-1)

    def chosen(self, first: int, last: int, rollouts: int) -> list[int]:
        """Returns the indices within their iteration of samples first .. last-1, which lie in one iteration.

        Args:
            rollouts: answers of the iteration.
        """
        iteration, start = self.place(first)
        epoch, begin = divmod(start, rollouts)
        end = begin + last - first
        orders = [self.order(iteration, epoch + i, rollouts) for i in range(ceil(end / rollouts))]
        found: list[int] = np.concatenate(orders)[begin:end].tolist()
        return found
