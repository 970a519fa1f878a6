"""Means over the answers of an iteration, and alarms about them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache

import numpy as np

from stoker.train.rollouts.policy_settings import PolicySettings
from stoker.train.rollouts.rollout import Rollout

APART = 0.02  # nats: mean difference between the engine's and the trainer's log-probabilities; float32 gives 1e-5
NEGATIVE = -1.0  # nats per answer: lower than by chance
FAR = 1.0  # nats per token: mean log-ratio to the reference; policies that still write its language are far below
NEVER_ENDS = 0.05  # share of answers with a stop token below which the alarm is raised
COLLAPSED, GROWN = 0.25, 4.0  # of the mean length of the first iteration
RATIO, APPROX_KL = 0.01, 1e-3  # limits before the first step on new answers: of |ratio - 1|, and of the KL


def figures_of(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Returns the figures of an iteration for `metrics.jsonl`: see docs/alignment.md."""
    every = {name: np.concatenate([r.tokens[name] for r in rollouts]) for name in rollouts[0].tokens}
    scores = [r.score for r in rollouts]
    figures = {
        "score": float(np.mean(scores)),
        "score_deviation": float(np.std(scores)) if min(scores) < max(scores) else 0.0,  # else perhaps rounding
        "entropy": float(every["entropy"].mean()),
        "response_tokens": float(np.mean([r.length for r in rollouts])),
        "ended": float(np.mean([r.stopped for r in rollouts])),
        "logprob_difference": float(np.abs(every["old"] - every["sampled"]).mean()),
    }
    if "reference" in every:
        figures["kl"] = float(np.mean([r.kl for r in rollouts]))
    if "value" in every:
        variance = float(every["return"].var())
        residual = float((every["return"] - every["value"]).var())
        figures["explained_variance"] = 1.0 - residual / variance if variance else 0.0
    for name in rollouts[0].rewards if len(rollouts[0].rewards) > 1 else ():
        figures[f"reward/{name}"] = float(np.mean([r.rewards[name] for r in rollouts]))
    return figures


def reward_figures(rollouts: Sequence[Rollout], kl: float) -> dict[str, float]:
    """Returns the figures of a KL in the reward: what it subtracts from an answer, and the sum with the score.

    Args:
        kl: factor of the KL.
    """
    kl_reward = -kl * float(np.mean([r.kl for r in rollouts]))
    return {"kl_reward": kl_reward, "total_reward": float(np.mean([r.score for r in rollouts])) + kl_reward}


def alarms(figures: Mapping[str, float], first: Mapping[str, float], settings: PolicySettings) -> dict[str, str]:
    """Returns alarms about an iteration, each by its kind and with its likely cause.

    Args:
        first: figures of the run's first iteration.
    """
    apart, kl, ended = figures["logprob_difference"], figures.get("kl", 0.0), figures["ended"]
    length = figures["response_tokens"] / max(1.0, first["response_tokens"])
    # An answer cut at max_tokens has that length: if most are shorter, the next turn did not fit into seq_len.
    full = figures["response_tokens"] < (1 - NEVER_ENDS) * settings.max_tokens
    masked = settings.mask_truncated and not ended and not full
    alike = not figures["informative"] if settings.in_groups else not figures["score_deviation"]
    checks = {
        "log-probabilities": (
            apart > APART,
            f"log-probabilities of the same tokens differ by {apart:.3f} between sampling and training: low precision, "
            "or answers from other weights than those in training",
        ),
        "negative KL": (
            kl < NEGATIVE,
            f"the KL to the reference is negative ({kl:.2f}), which it cannot be: the answers do not come from the "
            "policy's own distribution, or the reference is not the model at its start",
        ),
        "large KL": (
            kl > FAR * figures["response_tokens"],
            f"the KL to the reference is {kl:.1f} nats an answer, more than {FAR:g} a token: the policy no longer "
            "writes what the reference writes; lower train.lr, or raise kl",
        ),
        "no room": (
            ended < NEVER_ENDS and full,
            f"{ended:.0%} of the answers end with a stop token, as the environment's replies do not fit into "
            "train.seq_len: raise it, or allow fewer turns",
        ),
        "all masked": (
            masked,
            "no answer ends with a stop token, and mask_truncated gives such answers no weight, so there is nothing to "
            "learn: raise max_tokens, or set mask_truncated to false",
        ),
        "no end": (
            ended < NEVER_ENDS and not full and not masked,
            f"{ended:.0%} of the answers end with a stop token: raise max_tokens, or train the model to stop first; a "
            "missing_end_penalty teaches it",
        ),
        "no variance": (
            alike and not settings.critic,
            "answers that are compared all have the same score, so there is nothing to learn: the prompts are too easy "
            "or too hard, or the reward does not read what is written",
        ),
        "constant score": (
            alike and settings.critic and settings.plan.rollouts > 1,
            "all answers of a round have the same score, from which neither policy nor critic learns: the prompts are "
            "too easy or too hard, or the reward does not read what is written",
        ),
        "short": (
            length < COLLAPSED,
            f"answers are {length:.0%} of their first length: the reward may be largest for short answers",
        ),
        "long": (
            length > GROWN,
            f"answers are {length:.1f} times their first length: the reward may grow with length",
        ),
    }
    return {kind: text for kind, (wrong, text) in checks.items() if wrong}


class NewAlarms:
    """Alarms about iterations, each of a kind that the iteration before did not raise.

    Args:
        first: returns the figures of the run's first iteration that is kept.
    """

    def __init__(self, settings: PolicySettings, first: Callable[[], Mapping[str, float]]) -> None:
        self._settings, self._first = settings, cache(first)
        self._raised: set[str] = set()

    def about(self, figures: Mapping[str, float]) -> list[str]:
        """Returns the alarms about the next iteration."""
        now = alarms(figures, self._first(), self._settings)
        new = [text for kind, text in now.items() if kind not in self._raised]
        self._raised = set(now)
        return new


def ratio_alarms(measures: Mapping[str, float]) -> list[str]:
    """Returns an alarm where the policy in training is not the one that has sampled, before the first step."""
    ratio, approx_kl = measures["ratio"], measures["approx_kl"]
    if abs(ratio - 1) <= RATIO and approx_kl <= APPROX_KL:
        return []
    return [
        f"the probability ratio is {ratio:.3f} before the first step on new answers, and must be 1 "
        f"(approx_kl {approx_kl:.2g}): dropout is active, or passes with and without gradients differ"
    ]
