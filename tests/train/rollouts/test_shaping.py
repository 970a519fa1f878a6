"""Penalties, clips, whitening and advantages of answers, by value, against formulas written out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from answers import answer, answers
from numpy.testing import assert_allclose
from running import write_job

from stoker.errors import UserError
from stoker.job.load_job import load_job
from stoker.train.rollouts.iteration_plan import IterationPlan
from stoker.train.rollouts.policy_settings import PolicySettings
from stoker.train.rollouts.rollout import Rollout
from stoker.train.rollouts.shaping import add_advantages, groups, penalised, tells_apart, token_weights
from stoker.train.tasks import grpo as grpo_task
from stoker.train.tasks import ppo as ppo_task


def settings(**more: Any) -> PolicySettings:
    plan = IterationPlan(prompts=2, answers=3, epochs=1, batch=6, seed=0)
    plain = {"max_tokens": 20, "temperature": 1.0, "advantage": "group mean", "whiten": False, "weight": "token"}
    return PolicySettings(plan, **{**plain, "kl": 0.0, "kl_in_reward": False, **more})


@pytest.mark.parametrize(
    ("length", "stopped", "score", "more", "expected"),
    [
        (7, False, 1.0, {}, 1.0),
        (7, True, 1.0, {"missing_end": 2.5}, 1.0),
        (7, False, 1.0, {"missing_end": 2.5}, -1.5),
        # Yu et al., 2025, equation 13, with L_max 20 and L_cache 8
        (12, True, 1.0, {"overlong": 8}, 1.0),
        (13, True, 1.0, {"overlong": 8}, 1.0 - 1 / 8),
        (18, True, 1.0, {"overlong": 8}, 1.0 - 6 / 8),
        (20, False, 1.0, {"overlong": 8}, 0.0),
        (20, False, 1.0, {"overlong": 8, "missing_end": 0.5}, -0.5),
        (7, True, 3.0, {"score_clip": 2.0}, 2.0),
        (7, True, -3.0, {"score_clip": 2.0}, -2.0),
        (7, True, 1.5, {"score_clip": 2.0}, 1.5),
        (7, False, -1.5, {"score_clip": 2.0, "missing_end": 1.0}, -2.0),  # penalties come before the clip
    ],
)
def test_a_score_with_its_penalties(
    length: int, stopped: bool, score: float, more: dict[str, Any], expected: float
) -> None:
    assert penalised(answer(length, score=score, stopped=stopped), settings(**more)) == pytest.approx(expected)


@pytest.mark.parametrize("weight", ["token", "answer", "longest", "sum"])
def test_truncated_answers_have_no_weight_and_the_others_keep_theirs(weight: str) -> None:
    rollouts = [answer(length, stopped=length != 5, seed=length) for length in (3, 5, 2)]
    add_advantages(rollouts, settings(), 0.0)
    whole = token_weights(rollouts, settings(weight=weight))
    masked = token_weights(rollouts, settings(weight=weight, mask_truncated=True))
    for kept, all_own, own in zip((1.0, 0.0, 1.0), whole, masked, strict=True):
        np.testing.assert_array_equal(own, kept * all_own)


def test_answers_to_a_prompt_are_a_group() -> None:
    assert [[r.prompt for r in group] for group in groups(answers())] == [[0, 0, 0], [1, 1, 1]]


def token_rewards(rollout: Rollout, kl: float) -> np.ndarray:
    """Ziegler et al., 2019, equation 2: minus the KL at each token, and the score at the last."""
    rewards = [-kl * (old - ref) for old, ref in zip(rollout.tokens["old"], rollout.tokens["reference"], strict=True)]
    rewards[-1] += rollout.score
    return np.array(rewards)


@pytest.mark.parametrize("kl_in_reward", [True, False])
def test_rewards_are_divided_by_their_deviation_and_keep_their_mean(kl_in_reward: bool) -> None:
    found = answers()
    every = np.concatenate([token_rewards(r, 0.3 if kl_in_reward else 0.0) for r in found])
    n = len(every)
    mean = sum(every) / n
    deviation = (sum((x - mean) ** 2 for x in every) / (n - 1)) ** 0.5  # of all tokens, with Bessel's correction
    chosen = settings(advantage="gae", whiten_rewards=True, kl=0.3, kl_in_reward=kl_in_reward, gamma=0.9, lam=0.8)
    add_advantages(found, chosen, 0.3)
    rewards = np.concatenate([r.tokens["reward"] for r in found])
    assert_allclose(rewards, (every - mean) / deviation + mean, rtol=1e-6)
    for r in found:  # Schulman et al., 2016, equation 16, as a sum
        values = [*r.tokens["value"], 0.0]
        deltas = [r.tokens["reward"][t] + 0.9 * values[t + 1] - values[t] for t in range(r.length)]
        expected = [sum((0.9 * 0.8) ** (k - t) * deltas[k] for k in range(t, r.length)) for t in range(r.length)]
        assert_allclose(r.tokens["advantage"], expected, rtol=1e-9, atol=1e-12)
        assert_allclose(r.tokens["return"], np.array(expected) + r.tokens["value"], rtol=1e-9, atol=1e-12)


def test_returns_are_those_before_whitening() -> None:
    plain, white = answers(), answers()
    add_advantages(plain, settings(advantage="gae"), 0.0)
    add_advantages(white, settings(advantage="gae", whiten=True), 0.0)
    every = np.concatenate([r.tokens["advantage"] for r in plain])
    found = np.concatenate([r.tokens["advantage"] for r in white])
    assert_allclose(found, (every - every.mean()) / every.std(ddof=1), rtol=1e-6)
    for a, b in zip(plain, white, strict=True):
        assert_allclose(a.tokens["return"], b.tokens["return"])


@pytest.mark.parametrize("advantage", ["group", "group mean", "leave one out", "reward to go", "gae"])
def test_advantages_are_clipped_after_whitening(advantage: str) -> None:
    plain, clipped = answers(), answers()
    add_advantages(plain, settings(advantage=advantage, whiten=True), 0.0)
    add_advantages(clipped, settings(advantage=advantage, whiten=True, advantage_clip=0.75), 0.0)
    before = np.concatenate([r.tokens["advantage"] for r in plain])
    found = np.concatenate([r.tokens["advantage"] for r in clipped])
    assert before.max() > 0.75 and before.min() < -0.75 and (abs(before) < 0.75).any()
    assert found.tolist() == [min(0.75, max(-0.75, x)) for x in before]
    if advantage == "gae":  # the critic learns the return as it is
        assert all((a.tokens["return"] == b.tokens["return"]).all() for a, b in zip(plain, clipped, strict=True))


@pytest.mark.parametrize(("task", "of"), [("grpo", grpo_task.settings_of), ("ppo", ppo_task.settings_of)])
def test_penalties_and_clips_are_those_of_the_job(task: str, of: Any, base: Path, sft: dict[str, Any]) -> None:
    def chosen(block: dict[str, Any]) -> PolicySettings:
        job = {key: value for key, value in sft.items() if key not in ("task", "train")}
        return of(load_job(write_job(base, {**job, "task": task, task: {"rewards": "exact", **block}})).job)  # type: ignore[no-any-return]

    found = chosen({"advantage_clip": 2.5, "reward_clip": 4.0, "missing_end_penalty": 1.5})
    assert (found.advantage_clip, found.score_clip, found.missing_end) == (2.5, 4.0, 1.5)
    found = chosen({})
    assert (found.advantage_clip, found.score_clip, found.missing_end) == (None, None, 0.0)
    for nonsense in (0, -1, ".inf", ".nan", "much"):
        with pytest.raises(UserError, match="advantage_clip"):
            chosen({"advantage_clip": nonsense})


def test_answers_that_are_all_right_tell_as_little_as_those_that_are_all_wrong() -> None:
    assert [tells_apart([answer(2, score=score) for score in scores]) for scores in ([1, 1], [0, 0], [0, 1])] == [
        False,
        False,
        True,
    ]
