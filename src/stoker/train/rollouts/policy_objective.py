"""Policy loss on sampled answers: the clipped surrogate of PPO and its variants.

Shapes: N answer tokens, R answers. With ratio = exp(log pi - log pi_old), advantage A and KL estimate k to the
reference, a token's loss is

    -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A) + kl * k - entropy * H

(Schulman et al., 2017, eq. 7). The variants differ in the ratio, which may be per answer instead of per token (GSPO;
Zheng et al., 2025, eq. 7), and in whether the sum weights tokens or answers equally.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from stoker.models.attention.collate import Inputs
from stoker.models.head import Head, LogitsHead
from stoker.models.objective import Loss, Measures
from stoker.train.rollouts.token_scores import TrainedScores

OLD = "old"  # given to passes over answers that have been scored before the step
PTX = "ptx"  # given to passes over other data, not to those over answers
LOG_RATIO = 20.0  # log-ratios are clamped to this, so that exp is finite
LARGEST_K3 = 10.0  # k3 is clamped to this: it grows as exp, and one token would outweigh all others
KL = Literal["k1", "k2", "k3", "k3+"]


def kl_estimate(log_p_N: Tensor, reference_N: Tensor, kind: KL) -> Tensor:
    """Estimates KL(policy, reference) at each token, shape (N,), as a loss term.

    Values, with l = log p - log reference (Schulman, 2020): k1 = l, k2 = l^2 / 2, k3 = exp(-l) - 1 + l. As a loss only
    k2 has the gradient of the reverse KL; k1's is zero in expectation, and k3's is that of the forward KL. ``k3+`` has
    the value of k3 and the gradient of k2. Values of k3 are clamped to `LARGEST_K3`, where k3 itself has no gradient.
    """
    log_ratio_N = (log_p_N - reference_N).clamp(-LOG_RATIO, LOG_RATIO)
    if kind == "k1":
        return log_ratio_N
    k2_N = log_ratio_N.square() / 2
    if kind == "k2":
        return k2_N
    k3_N = ((-log_ratio_N).expm1() + log_ratio_N).clamp(max=LARGEST_K3)
    return k3_N if kind == "k3" else k3_N.detach() + k2_N - k2_N.detach()


class PolicyMeasures(Measures):
    """Measures of a policy's step; ``ratio_variance`` is summed as squared distances of the ratio from 1."""

    def means(self, sums: Sequence[float], targets: int) -> dict[str, float]:
        """Computes the means; the variance is around the mean ratio."""
        found = super().means(sums, targets)
        return found | {"ratio_variance": max(found["ratio_variance"] - (found["ratio"] - 1) ** 2, 0.0)}


@dataclass(frozen=True)
class PolicyObjective:
    """The loss of a policy.

    Attributes:
        clip_low, clip_high: clipping range of the ratio below and above 1.
        dual_clip: bound of the loss of a token with a negative advantage, as a multiple of it (Ye et al., 2020); None
            for no bound.
        kl: factor of the KL estimate.
        estimator: estimator of the KL.
        entropy: factor of the entropy bonus.
        temperature: temperature that answers are sampled with.
        sequence_ratio: whether the ratio is per answer.
        critic: whether a critic is measured as well.
        ptx: factor of the cross entropy of other data, which has its own passes; 0 without such data.
        by_answer: whether the step's targets are answers, so that measures are means over them.
    """

    clip_low: float
    clip_high: float
    dual_clip: float | None = None
    kl: float = 0.0
    estimator: KL = "k3+"
    entropy: float = 0.0
    temperature: float = 1.0
    sequence_ratio: bool = False
    critic: bool = False
    ptx: float = 0.0
    by_answer: bool = False
    measures: Measures = field(init=False)
    trained: TrainedScores = field(init=False, default_factory=TrainedScores)

    def __post_init__(self) -> None:
        names = ("ratio", "ratio_variance", "approx_kl", "clip_fraction", *self._beside)
        object.__setattr__(self, "measures", PolicyMeasures(*names))

    @property
    def _beside(self) -> list[str]:
        of_critic = ["value_loss", "value_clip_fraction"] * self.critic
        return ["loss_kl"] * (self.kl > 0) + of_critic + ["ptx_loss"] * (self.ptx > 0)

    def _cross_entropy(self, hidden_ND: Tensor, inputs: Inputs, head: Head | LogitsHead) -> Loss:
        log_p_N = head.scores(hidden_ND, inputs.targets).log_probability
        loss = -(inputs.given[PTX].to(log_p_N) * log_p_N).sum()
        self.measures.add(inputs, ptx_loss=loss)
        return Loss(self.ptx * loss, None)

    def __call__(self, hidden_ND: Tensor, inputs: Inputs, head: Head | LogitsHead) -> Loss:
        """See `stoker.models.objective.Objective`. ``inputs.given`` holds, by target, ``old``, ``advantage`` and
        ``weight``, and ``reference`` where there is a KL term; of other data ``ptx``, a target's share of the mean.
        Without ``old`` the old policy is this one, and its scores are kept in ``trained``."""
        if PTX in inputs.given:
            return self._cross_entropy(hidden_ND, inputs, head)
        unscored = inputs.rows > 0 and OLD not in inputs.given
        tempered = head.tempered(self.temperature)
        trains_entropy = self.entropy > 0
        scores = tempered.scores(
            hidden_ND, inputs.targets, entropy=trains_entropy or unscored, entropy_gradient=trains_entropy
        )
        log_p_N = scores.log_probability
        given = inputs.given if inputs.rows else dict.fromkeys((OLD, "advantage", "weight", "reference"), log_p_N)
        if unscored:
            self.trained.add(inputs, scores)
            given = {**given, OLD: log_p_N.detach()}
        old_N, advantage_N, weight_N = given[OLD], given["advantage"], given["weight"]
        log_ratio_N = (log_p_N - old_N).clamp(-LOG_RATIO, LOG_RATIO)
        used_N = self._of_sequences(log_ratio_N, inputs) if self.sequence_ratio else log_ratio_N
        ratio_N = used_N.exp()
        clipped_N = ratio_N.clamp(1 - self.clip_low, 1 + self.clip_high)
        gain_N = torch.minimum(ratio_N * advantage_N, clipped_N * advantage_N)
        if self.dual_clip is not None:
            gain_N = torch.where(advantage_N < 0, gain_N.maximum(self.dual_clip * advantage_N), gain_N)
        loss_N = -gain_N
        measured: dict[str, Tensor] = {}
        share_N = 1 / self._lengths(log_ratio_N, inputs) if self.by_answer else torch.ones_like(log_ratio_N)
        if self.kl:
            loss_N = loss_N + self.kl * kl_estimate(log_p_N, given["reference"], self.estimator)
            measured["loss_kl"] = (share_N * kl_estimate(log_p_N.detach(), given["reference"], "k3")).sum()
        if trains_entropy and scores.entropy is not None:
            loss_N = loss_N - self.entropy * scores.entropy
        binds_N = (gain_N < ratio_N * advantage_N).to(weight_N)
        self.measures.add(
            inputs,
            ratio=(share_N * ratio_N).sum(),
            ratio_variance=(share_N * (ratio_N - 1).square()).sum(),
            # k3 of the old policy to this one, as log p is sampled from the old one.
            approx_kl=(share_N * (log_ratio_N.exp() - 1 - log_ratio_N)).sum(),
            clip_fraction=(share_N * binds_N).sum(),
            **measured,
        )
        return Loss((weight_N * loss_N).sum(), None)

    def _of_sequences(self, log_ratio_N: Tensor, inputs: Inputs) -> Tensor:
        """Returns each answer's mean log-ratio at each of its tokens, shape (N,)."""
        return inputs.sum_by_document(log_ratio_N)[inputs.documents] / self._lengths(log_ratio_N, inputs)

    @staticmethod
    def _lengths(like_N: Tensor, inputs: Inputs) -> Tensor:
        """Returns the length of each token's answer, shape (N,)."""
        return inputs.sum_by_document(torch.ones_like(like_N))[inputs.documents]
