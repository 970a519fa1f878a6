"""Reward shaping, advantages over all answers of an iteration, and the weights of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from stoker.train.rollouts.advantages import gae, leave_one_out, of_group, to_go, whitened
from stoker.train.rollouts.policy_settings import PolicySettings
from stoker.train.rollouts.rollout import Rollout


def groups(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """Groups the answers by prompt; those to one prompt are consecutive."""
    return [list(group) for _, group in groupby(rollouts, key=lambda rollout: rollout.prompt)]


def penalised(rollout: Rollout, settings: PolicySettings) -> float:
    """Returns a score with the penalties for length and a missing end, clipped."""
    score = rollout.score
    if not rollout.stopped:
        score -= settings.missing_end
    if settings.overlong:
        over = rollout.length - (settings.max_tokens - settings.overlong)
        score -= max(0.0, over / settings.overlong)
    if settings.score_clip is not None:
        score = min(settings.score_clip, max(-settings.score_clip, score))
    return score


def add_advantages(
    rollouts: Sequence[Rollout], settings: PolicySettings, kl: float, kind: type[np.floating] = np.float64
) -> None:
    """Adds to every token its ``advantage``, its ``reward`` where rewards are per token, and its ``return`` with a
    critic.

    ``rollouts`` are those of the whole iteration and all processes, as means and deviations are over them.

    Args:
        kl: factor of the KL in this iteration.
        kind: type of the values that are added.
    """
    if not settings.kl_in_reward:
        kl = 0.0
    if settings.advantage in ("gae", "reward to go"):
        rewards = _token_rewards(rollouts, settings, kl, kind)
        for rollout, rewards_A in zip(rollouts, rewards, strict=True):
            rollout.tokens["reward"] = rewards_A
            if settings.advantage == "reward to go":
                rollout.tokens["advantage"] = to_go(rewards_A, settings.gamma)
                continue
            advantages_A, returns_A = gae(rewards_A, rollout.tokens["value"], gamma=settings.gamma, lam=settings.lam)
            rollout.tokens |= {"advantage": advantages_A, "return": returns_A}
    else:
        for group in groups(rollouts):
            for rollout, advantage in zip(group, _of_group(group, settings, kl), strict=True):
                rollout.tokens["advantage"] = np.full(rollout.length, advantage, kind)
    if settings.whiten:
        advantages = whitened([rollout.tokens["advantage"] for rollout in rollouts], shift=True)
        for rollout, advantages_A in zip(rollouts, advantages, strict=True):
            rollout.tokens["advantage"] = advantages_A
    if settings.advantage_clip is not None:
        for rollout in rollouts:
            clipped_A = rollout.tokens["advantage"].clip(-settings.advantage_clip, settings.advantage_clip)
            rollout.tokens["advantage"] = clipped_A


def _of_group(group: Sequence[Rollout], settings: PolicySettings, kl: float) -> np.ndarray:
    """Returns the advantage of each answer to one prompt."""
    scores_G = np.array([rollout.score for rollout in group])
    if kl:
        scores_G = scores_G - kl * np.array([rollout.kl for rollout in group])
    if settings.advantage == "leave one out":
        return leave_one_out(scores_G)
    return of_group(scores_G, scaled=settings.advantage == "group")


def _token_rewards(
    rollouts: Sequence[Rollout], settings: PolicySettings, kl: float, kind: type[np.floating]
) -> list[np.ndarray]:
    """Returns the reward of each token: minus the KL estimate k1, plus the score at the last token."""
    rewards = []
    for rollout in rollouts:
        rewards_A = np.zeros(rollout.length, kind)
        if kl:
            rewards_A -= kl * (rollout.tokens["old"] - rollout.tokens["reference"])
        rewards_A[-1] += rollout.score
        rewards.append(rewards_A)
    return whitened(rewards, shift=False) if settings.whiten_rewards else rewards


def tells_apart(group: Sequence[Rollout]) -> bool:
    """Returns whether the answers to a prompt differ in score, so that they give a gradient."""
    return len({rollout.score for rollout in group}) > 1


def token_weights(rollouts: Sequence[Rollout], settings: PolicySettings) -> list[np.ndarray]:
    """Returns the weights of the tokens of answers in the step's sum; see `PolicySettings.weight` and
    ``mask_truncated``.
    """
    of = {"answer": lambda r: r.length, "longest": lambda _: settings.max_tokens}
    tokens = of.get(settings.weight, lambda _: 1)
    counted = [r.stopped or not settings.mask_truncated for r in rollouts]
    return [np.full_like(r.tokens["advantage"], own / tokens(r)) for r, own in zip(rollouts, counted, strict=True)]
