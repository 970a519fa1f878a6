"""Objective of `task: dpo`: a loss on the log-probabilities of answers, and its measures.

Shapes: N targets, R rows (answers), P pairs of them, the chosen one first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stoker.models.attention.collate import Inputs
from stoker.models.head import Head, LogitsHead
from stoker.models.objective import Loss, Measures
from stoker.train.preference import preference_losses as losses

if TYPE_CHECKING:
    from stoker.train.tasks.dpo import ResolvedDpoBlock

ROUNDING = 64  # units in the last place of a summed log-probability
REFERENCE, GOOD, KL = "reference", "good", "kl"  # in `Inputs.given`


def answer_scores(hidden_ND: Tensor, inputs: Inputs, head: Head | LogitsHead) -> tuple[Tensor, Tensor]:
    """Returns (summed log-probability, trained tokens) of each document, both of shape (R,)."""
    log_p_N = head.scores(hidden_ND, inputs.targets).log_probability
    return inputs.sum_by_document(log_p_N), inputs.sum_by_document(torch.ones_like(log_p_N))


class PairMeasures(Measures):
    """Rewards of chosen and rejected answers, their difference, and the share of pairs where it is above 0."""

    def __init__(self) -> None:
        super().__init__("chosen_reward", "rejected_reward", "margin", "accuracy")


class JudgedMeasures(Measures):
    """Measures of answers judged one by one: mean rewards of the good and of the bad ones."""

    def __init__(self) -> None:
        super().__init__("good_reward", "bad_reward", "good", "right", "kl")

    def means(self, sums: Sequence[float], targets: int) -> dict[str, float]:
        """Computes the means; the margin is their difference, and an answer is right if its reward is on the right side
        of the KL term.
        """
        of_good, of_bad, good, right, kl = sums
        bad = targets - good
        found = {"accuracy": right / max(1, targets), "kl": kl / max(1, targets)}
        found |= {"chosen_reward": of_good / good} if good else {}
        found |= {"rejected_reward": of_bad / bad} if bad else {}
        return found | ({"margin": of_good / good - of_bad / bad} if good and bad else {})


class PreferenceObjective:
    """Loss of a job's ``dpo`` block, over pairs or judged answers."""

    def __init__(self, block: ResolvedDpoBlock) -> None:
        self._block = block
        self._beta, self._sft, self._margin = block.beta, block.sft_weight, block.margin
        self.measures: Measures = JudgedMeasures() if block.loss == "kto" else PairMeasures()

    def __call__(self, hidden_ND: Tensor, inputs: Inputs, head: Head | LogitsHead) -> Loss:
        block = self._block
        log_p_R, tokens_R = answer_scores(hidden_ND, inputs, head)
        ratio_R = log_p_R
        if block.reference != "none" and inputs.rows:
            ratio_R = ratio_R - inputs.given[REFERENCE].to(log_p_R)
        reward_R = self._beta * self.per_token(ratio_R, tokens_R)
        rounding_R = self._rounding(self.per_token(log_p_R, tokens_R))
        if block.loss == "kto":
            return self._judged(reward_R, rounding_R, inputs)
        chosen_P, rejected_P = reward_R.view(-1, 2).unbind(1)
        loss_P = self._of_pairs(chosen_P, rejected_P)
        if self._sft:
            loss_P = loss_P - self._sft * (log_p_R / tokens_R.clamp(min=1)).view(-1, 2)[:, 0]
        right_P = chosen_P - rejected_P > rounding_R.view(-1, 2).amax(1)
        self.measures.add(
            inputs,
            chosen_reward=chosen_P.sum(),
            rejected_reward=rejected_P.sum(),
            margin=(chosen_P - rejected_P).sum(),
            accuracy=right_P.sum().to(log_p_R),
        )
        return Loss(inputs.counted_once(loss_P.sum()), inputs.counted_once(right_P.sum()))

    def per_token(self, log_p_R: Tensor, tokens_R: Tensor) -> Tensor:
        """Divides log-probabilities by length if the job requests it."""
        return log_p_R / tokens_R.clamp(min=1) if self._block.length_normalise else log_p_R

    def _of_pairs(self, chosen_P: Tensor, rejected_P: Tensor) -> Tensor:
        block, beta, smoothing = self._block, self._beta, self._block.label_smoothing
        if block.loss == "orpo":
            return beta * losses.orpo(chosen_P / beta, rejected_P / beta)
        of_margin: dict[str, Callable[[Tensor], Tensor]] = {
            "sigmoid": partial(losses.sigmoid, label_smoothing=smoothing),
            "robust": partial(losses.robust, label_smoothing=smoothing),
            "hinge": losses.hinge,
            "ipo": partial(losses.ipo, beta=beta),
            "simpo": partial(losses.simpo, gamma=self._margin, label_smoothing=smoothing),
        }
        return of_margin[block.loss](chosen_P - rejected_P)

    def _rounding(self, log_p_R: Tensor) -> Tensor:
        """Returns the difference below which rewards count as equal: before the first step all are, up to rounding."""
        return self._beta * ROUNDING * torch.finfo(log_p_R.dtype).eps * log_p_R.detach().abs()

    def _judged(self, reward_R: Tensor, rounding_R: Tensor, inputs: Inputs) -> Loss:
        good_R = inputs.given[GOOD].to(torch.bool) if inputs.rows else torch.zeros_like(reward_R, dtype=torch.bool)
        kl_R = self._beta * inputs.given[KL].to(reward_R) if inputs.rows else reward_R.detach()
        loss_R = losses.kto(reward_R, good_R, kl_R, (self._block.good_weight, self._block.bad_weight))
        right_R = torch.where(good_R, reward_R - kl_R, kl_R - reward_R) > rounding_R
        self.measures.add(
            inputs,
            good_reward=reward_R[good_R].sum(),
            bad_reward=reward_R[~good_R].sum(),
            good=good_R.sum().to(reward_R),
            right=right_R.sum().to(reward_R),
            kl=kl_R.sum(),
        )
        return Loss(inputs.counted_once(loss_R.sum()), inputs.counted_once(right_R.sum()))
