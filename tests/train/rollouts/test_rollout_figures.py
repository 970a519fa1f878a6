"""Figures of an iteration against plain sums, and every alarm on both sides of its threshold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from answers import answers

from stoker.train.rollouts.iteration_plan import IterationPlan
from stoker.train.rollouts.policy_settings import PolicySettings
from stoker.train.rollouts.rollout import Rollout
from stoker.train.rollouts.rollout_figures import NewAlarms, alarms, figures_of, ratio_alarms, reward_figures

SOUND = {
    "logprob_difference": 1e-5,
    "kl": 0.5,
    "ended": 0.9,
    "response_tokens": 20.0,
    "score_deviation": 0.3,
    "informative": 0.7,
}
FIRST = {"response_tokens": 8.0}


def settings(answers: int, advantage: Any) -> PolicySettings:
    plan = IterationPlan(prompts=4, answers=answers, epochs=1, batch=4, seed=0)
    return PolicySettings(
        plan, max_tokens=8, temperature=1.0, advantage=advantage, whiten=False, weight="token", kl=0.0,
        kl_in_reward=False,
    )  # fmt: skip


GROUPS = settings(4, "group")


def test_nothing_is_said_of_a_sound_iteration() -> None:
    assert alarms(SOUND, FIRST, GROUPS) == {}
    assert alarms({name: value for name, value in SOUND.items() if name != "kl"}, FIRST, GROUPS) == {}


@pytest.mark.parametrize(
    ("kind", "figure", "quiet", "loud", "causes"),
    [
        ("log-probabilities", "logprob_difference", 0.02, 0.0201, ["differ by 0.020", "precision", "other weights"]),
        ("negative KL", "kl", -1.0, -1.01, ["negative (-1.01)", "policy's own distribution", "reference"]),
        ("large KL", "kl", 20.0, 20.1, ["20.1 nats an answer", "more than 1 a token", "train.lr", "raise kl"]),
        ("no end", "ended", 0.05, 0.049, ["5% of the answers end", "max_tokens", "missing_end_penalty"]),
        ("no end", "ended", 0.05, 0.0, ["0% of the answers end"]),
        ("no variance", "informative", 0.01, 0.0, ["same score", "too easy or too hard", "reward does not read"]),
        ("short", "response_tokens", 2.0, 1.99, ["25% of their first length", "reward may be largest for short"]),
        ("long", "response_tokens", 32.0, 32.1, ["4.0 times their first length", "reward may grow with length"]),
    ],
)
def test_an_alarm_begins_at_its_threshold(kind: str, figure: str, quiet: float, loud: float, causes: list[str]) -> None:
    assert alarms({**SOUND, figure: quiet}, FIRST, GROUPS) == {}
    ((found, text),) = alarms({**SOUND, figure: loud}, FIRST, GROUPS).items()
    assert found == kind and all(cause in text for cause in causes), text


@pytest.mark.parametrize(
    ("answers", "advantage", "compared"),
    [
        (4, "group", "informative"),
        (4, "group mean", "informative"),
        (4, "leave one out", "informative"),
        (1, "reward to go", "score_deviation"),
        (4, "reward to go", "score_deviation"),  # over all answers of the iteration, whatever their prompt
        (1, "gae", "score_deviation"),
        (4, "gae", "score_deviation"),
    ],
)
def test_scores_must_differ_among_the_answers_that_are_compared(answers: int, advantage: str, compared: str) -> None:
    used = settings(answers, advantage)
    (other,) = {"informative", "score_deviation"} - {compared}
    assert alarms({**SOUND, other: 0.0}, FIRST, used) == {}
    found = alarms({**SOUND, compared: 0.0}, FIRST, used)
    assert found.keys() == ({"constant score"} if advantage == "gae" else {"no variance"})


def test_one_answer_a_round_is_like_no_other() -> None:
    plan = IterationPlan(prompts=1, answers=1, epochs=1, batch=1, seed=0)
    assert alarms({**SOUND, "score_deviation": 0.0}, FIRST, replace(settings(1, "gae"), plan=plan)) == {}


def test_answers_without_an_end_that_are_short_did_not_fit_into_a_row() -> None:
    assert alarms({**SOUND, "ended": 0.0, "response_tokens": 8.0}, FIRST, GROUPS).keys() == {"no end"}
    found = alarms({**SOUND, "ended": 0.0, "response_tokens": 7.0}, FIRST, GROUPS)
    assert found.keys() == {"no room"} and "train.seq_len" in found["no room"]


def test_masked_answers_teach_nothing_where_none_ends() -> None:
    """A penalty of a missing end would not help: the answers that have it are those without weight."""
    masking, cut = replace(GROUPS, mask_truncated=True), {**SOUND, "ended": 0.0}
    ((kind, text),) = alarms(cut, FIRST, masking).items()
    assert kind == "all masked" and "raise max_tokens" in text and "penalty" not in text
    assert alarms({**SOUND, "ended": 0.01}, FIRST, masking).keys() == {"no end"}
    assert alarms({**cut, "response_tokens": 7.0}, FIRST, masking).keys() == {"no room"}


def test_several_alarms_at_once_are_all_given() -> None:
    figures = {**SOUND, "kl": -2.0, "ended": 0.0, "response_tokens": 100.0}
    assert list(alarms(figures, FIRST, GROUPS)) == ["negative KL", "no end", "long"]


def test_an_alarm_is_given_once_until_it_has_ended() -> None:
    told = NewAlarms(GROUPS, lambda: FIRST)
    wrong = {**SOUND, "kl": -2.0}
    assert [len(told.about(figures)) for figures in (SOUND, wrong, wrong, SOUND, wrong)] == [0, 1, 0, 0, 1]


@pytest.mark.parametrize(
    ("ratio", "approx_kl", "wrong"),
    [
        (1.0, 0.0, False),
        (1.0099, 0.0, False),
        (0.9901, 0.0, False),
        (1.0101, 0.0, True),
        (0.9899, 0.0, True),
        (1.0, 1e-3, False),
        (1.0, 1.01e-3, True),
        (float("nan"), 0.0, True),
    ],
)
def test_the_first_pass_has_a_ratio_of_one(ratio: float, approx_kl: float, wrong: bool) -> None:
    found = ratio_alarms({"ratio": ratio, "approx_kl": approx_kl})
    assert len(found) == wrong
    assert all(f"ratio is {ratio:.3f}" in text and "dropout is active" in text for text in found)


def answer(score: float, ended: Any, **tokens: list[float]) -> Rollout:
    ids = np.arange(len(tokens["old"]))
    arrays = {name: np.array(values) for name, values in tokens.items()}
    return Rollout(0, 0, "file", 1, ids, ids, ended, {"a": score, "b": 2 * score}, score, arrays)


def test_scores_that_are_all_the_same_have_no_deviation() -> None:
    tokens = {"old": [-1.0], "sampled": [-1.0], "entropy": [0.0]}
    assert np.std([0.1] * 7) != 0
    assert figures_of([answer(0.1, "stop", **tokens) for _ in range(7)])["score_deviation"] == 0.0


def test_figures_are_means_over_answers_or_over_their_tokens() -> None:
    found = figures_of(
        [
            answer(1.0, "stop", old=[-1.0, -2.0, -3.0], sampled=[-1.0, -2.5, -3.0], reference=[-2.0, -2.0, -2.0],
                   entropy=[1.0, 2.0, 3.0], value=[0.0, 0.0, 0.0], **{"return": [1.0, 1.0, 1.0]}),
            answer(4.0, "length", old=[-1.0], sampled=[-1.5], reference=[-2.0],
                   entropy=[0.0], value=[1.0], **{"return": [5.0]}),
        ]
    )  # fmt: skip
    assert found == pytest.approx(
        {
            "score": 2.5,
            "score_deviation": 1.5,
            "entropy": 6 / 4,  # over tokens
            "response_tokens": 2.0,
            "ended": 0.5,
            "logprob_difference": (0.5 + 0.5) / 4,
            "kl": (0.0 + 1.0) / 2,  # an answer's sum, over answers
            "explained_variance": 1 - np.var([1, 1, 1, 4]) / np.var([1, 1, 1, 5]),
            "reward/a": 2.5,
            "reward/b": 5.0,
        }
    )


def test_a_kl_in_the_reward_is_subtracted_from_the_score() -> None:
    found = answers()
    kl = np.mean([(r.tokens["old"] - r.tokens["reference"]).sum() for r in found])
    figures = reward_figures(found, 0.3)
    assert figures["kl_reward"] == pytest.approx(-0.3 * kl)
    assert figures["total_reward"] == pytest.approx(np.mean([r.score for r in found]) - 0.3 * kl)
