"""The losses of `task: dpo`, as functions of log-probabilities.

Shapes: P pairs, R rows of judged answers. Each loss has one value per pair or row, in the dtype of its arguments.

The reward of an answer is ``beta * (log p(answer) - log p_reference(answer))``, up to a constant of its prompt
(Rafailov et al., 2023, "Direct Preference Optimization", equation 5); without a reference, ``beta * log p(answer)``.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu


def sigmoid(margin_P: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """DPO: -log sigmoid of the reward difference (Rafailov et al., 2023, equation 7).

    Args:
        margin_P: reward of the chosen answer minus that of the rejected one.
        label_smoothing: share of labels assumed wrong: conservative DPO (Mitchell, 2023, "A note on DPO with noisy
            preferences", equation 3).
    """
    return -(1 - label_smoothing) * logsigmoid(margin_P) - label_smoothing * logsigmoid(-margin_P)


def robust(margin_P: Tensor, label_smoothing: float) -> Tensor:
    """Robust DPO: under labels flipped with this probability its mean is DPO's loss on clean labels (Chowdhury et al.,
    2024, "Provably Robust DPO", equation 11).
    """
    clean, flipped = -logsigmoid(margin_P), -logsigmoid(-margin_P)
    return ((1 - label_smoothing) * clean - label_smoothing * flipped) / (1 - 2 * label_smoothing)


def hinge(margin_P: Tensor) -> Tensor:
    """Hinge loss of the reward difference (Zhao et al., 2023, "SLiC-HF", equation 2, on DPO's rewards)."""
    return relu(1 - margin_P)


def ipo(margin_P: Tensor, beta: float) -> Tensor:
    """IPO: regresses the difference of the log-ratios to 1 / (2 beta) (Azar et al., 2023, "A General Theoretical
    Paradigm", equation 17).

    Args:
        margin_P: reward difference, which includes the factor beta.
    """
    return (margin_P / beta - 1 / (2 * beta)) ** 2


def simpo(margin_P: Tensor, gamma: float, label_smoothing: float = 0.0) -> Tensor:
    """SimPO: length-normalised rewards without a reference, with a margin of gamma (Meng et al., 2024, equation 6)."""
    return sigmoid(margin_P - gamma, label_smoothing)


def orpo(chosen_P: Tensor, rejected_P: Tensor) -> Tensor:
    """ORPO's odds-ratio term (Hong et al., 2024, "ORPO", equations 4 and 7), without its weight.

    Args:
        chosen_P, rejected_P: mean log-probability of an answer's tokens.
    """
    return -logsigmoid(_log_odds(chosen_P) - _log_odds(rejected_P))


def _log_odds(log_p: Tensor) -> Tensor:
    """log(p / (1 - p)); log1p and expm1 are each exact on one side of log 2 (Maechler, 2012)."""
    log_p = log_p.clamp(max=-torch.finfo(log_p.dtype).tiny)
    near, far = log_p.clamp(min=-0.6931), log_p.clamp(max=-0.6931)
    complement = torch.where(log_p > -0.6931, torch.log(-torch.expm1(near)), torch.log1p(-torch.exp(far)))
    return log_p - complement


def kto(reward_R: Tensor, good_R: Tensor, kl_R: Tensor, weights: tuple[float, float] = (1.0, 1.0)) -> Tensor:
    """KTO: prospect-theory value of good and bad answers (Ethayarajh et al., 2024, "KTO", equation 8).

    Args:
        good_R: whether each answer is good.
        kl_R: beta times the estimated KL divergence from the reference, without gradient, at least 0.
        weights: weight of good answers and of bad ones.
    """
    good, bad = weights
    difference = reward_R - kl_R
    return torch.where(good_R, good * (1 - difference.sigmoid()), bad * (1 - (-difference).sigmoid()))
