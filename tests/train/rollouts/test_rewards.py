"""Rewards of answers: by their length, by scorers, several together."""

from __future__ import annotations

import math
import signal
import threading
import time
from typing import Any

import pytest

from stoker.errors import UserError
from stoker.scoring.answer_rows import AnswerRow
from stoker.scoring.scorer import Score, Scorer
from stoker.train.rollouts.rewards import PolicyAnswer, Rewards, ScorerReward, length_reward


def answer(text: str, *, tokens: int = 1, row: int = 1, expected: object = None) -> PolicyAnswer:
    ids = tuple(range(2 * tokens))  # with an earlier turn
    return PolicyAnswer(text, AnswerRow("rows.jsonl", row, (), expected, (), {}), (1,), ids, tokens, True)


@pytest.mark.parametrize(
    ("argument", "tokens", "expected"),
    [
        ("40", 40, 1.0),
        ("40", 30, 0.75),
        ("40", 50, 0.75),
        ("40", 90, 0.0),
        ("20-60", 20, 1.0),
        ("20-60", 60, 1.0),
        ("20-60", 15, 0.75),
        ("20-60", 75, 0.75),
        ("20-60", 121, 0.0),
    ],
)
def test_length(argument: str, tokens: int, expected: float) -> None:
    assert length_reward(argument)([answer("", tokens=tokens)]) == [pytest.approx(expected)]


@pytest.mark.parametrize("argument", ["", "0", "-5", "5-", "60-20", "a-b", "1-2-3"])
def test_a_length_that_is_none(argument: str) -> None:
    with pytest.raises(UserError, match="write length:40, or length:20-60"):
        length_reward(argument)


def test_rewards_are_weighted_and_named() -> None:
    count = ScorerReward("count", Scorer("count", lambda text, _: Score(float(len(text)))))
    rewards = Rewards(((count, 2.0), (length_reward("4"), -1.0)))
    parts, sums = rewards([answer("abc", tokens=4), answer("a", tokens=2)])
    assert parts == [{"count": 3.0, "length:4": 1.0}, {"count": 1.0, "length:4": 0.5}] and sums == [5.0, 1.5]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_reward_that_is_no_number_names_the_row(value: float) -> None:
    wrong = ScorerReward("odd", Scorer("odd", lambda text, _: Score(value if text else 1.0)))
    with pytest.raises(UserError, match=f"rows.jsonl:2: the reward odd returned {value}"):
        Rewards(((wrong, 1.0),))([answer(""), answer("x", row=2)])


@pytest.mark.parametrize("waits", [False, True])
def test_answers_keep_their_order(waits: bool) -> None:
    scorer = Scorer("count", lambda text, _: Score(float(len(text))), waits=waits)
    assert ScorerReward("count", scorer)([answer("x" * i) for i in range(20)]) == list(range(20))


def test_a_signal_does_not_wait_for_a_judge() -> None:
    main, answered = threading.get_ident(), threading.Event()

    def score(*_: Any) -> Score:
        time.sleep(0.1)  # until the caller waits
        signal.pthread_kill(main, signal.SIGINT)
        answered.wait(10)
        return Score(0.0)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background
    begin = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            ScorerReward("judge", Scorer("judge", score, waits=True))([answer("a")])
        assert time.monotonic() - begin < 5
    finally:
        answered.set()
        signal.signal(signal.SIGINT, before)


def test_all_answers_reach_a_scorer_of_batches() -> None:
    scorer = Scorer(
        "rank",
        lambda *_: Score(0.0),
        batch=lambda texts, rows, ids=None: [Score(float(sorted(texts).index(text))) for text in texts],
    )
    assert ScorerReward("rank", scorer)([answer("b"), answer("c"), answer("a")]) == [1.0, 2.0, 0.0]
    assert ScorerReward("rank", scorer)([]) == []
