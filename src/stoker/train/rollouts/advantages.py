"""Advantages of answers: how much better than expected each token was.

Shapes: A tokens of an answer, G answers to a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

EPSILON = 1e-8


def gae(rewards_A: np.ndarray, values_A: np.ndarray, *, gamma: float, lam: float) -> tuple[np.ndarray, np.ndarray]:
    """Generalised advantage estimation (Schulman et al., 2016, eq. 16): (advantages, returns), both of shape (A,).

    The value after the last token is 0: the answer ends there, for whatever reason. Returns are advantages plus values,
    before whitening.
    """
    advantages_A = np.zeros_like(values_A)
    after, following = 0.0, 0.0
    for t in reversed(range(len(values_A))):
        delta = rewards_A[t] + gamma * following - values_A[t]
        after = delta + gamma * lam * after
        advantages_A[t] = after
        following = values_A[t]
    return advantages_A, advantages_A + values_A


def whitened(values: Sequence[np.ndarray], *, shift: bool) -> list[np.ndarray]:
    """Divides the values of all answers of an iteration by their standard deviation (Bessel's correction).

    Args:
        shift: whether to subtract the mean; it stays for rewards.
    """
    everything = np.concatenate(values).astype(np.float64)
    mean = everything.mean()
    variance = everything.var(ddof=1) if len(everything) > 1 else 0.0
    scale = 1.0 / np.sqrt(variance + EPSILON)
    kept = 0.0 if shift else mean
    return [((v - mean) * scale + kept).astype(v.dtype) for v in values]


def of_group(scores_G: np.ndarray, *, scaled: bool) -> np.ndarray:
    """Subtracts the mean from the scores of the answers to a prompt, of which there are two or more; ``scaled`` divides
    by their standard deviation.

    Shao et al., 2024 (GRPO) scale. Liu et al., 2025 (Dr. GRPO) do not, as it gives more weight to prompts that are
    nearly always or nearly never answered right.
    """
    centred_G = scores_G - scores_G.mean()
    if not scaled:
        return centred_G
    return centred_G / (scores_G.std(ddof=1) + 1e-4)


def leave_one_out(scores_G: np.ndarray) -> np.ndarray:
    """Subtracts from each of two scores or more the mean of the others (RLOO; Ahmadian et al., 2024, eq. 8)."""
    count = len(scores_G)
    return (scores_G - scores_G.mean()) * (count / (count - 1))


def to_go(rewards_A: np.ndarray, gamma: float) -> np.ndarray:
    """Returns the discounted sum of the rewards from each token on, shape (A,)."""
    sums_A, after = np.zeros_like(rewards_A), 0.0
    for t in reversed(range(len(rewards_A))):
        after = rewards_A[t] + gamma * after
        sums_A[t] = after
    return sums_A
