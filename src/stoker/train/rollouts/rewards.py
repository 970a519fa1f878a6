"""Rewards of a job: computed one by one, and combined as a weighted sum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from stoker.errors import Problem, UserError
from stoker.scoring.answer_rows import AnswerRow
from stoker.scoring.concurrent_calls import ConcurrentCalls
from stoker.scoring.scorer import Score, Scorer
from stoker.scoring.scorers import scorer_problem

LENGTH = "length"  # the reward that is not a scorer


@dataclass(frozen=True)
class PolicyAnswer:
    """An answer as rewards receive it.

    Attributes:
        text: text of the model's last turn, without special tokens.
        row: row of its prompt.
        prompt_ids, ids: token ids; those of all turns.
        last_turn: number of tokens of the model's last turn.
        stopped: whether it ended with a stop token.
        turns: the conversation with the answer.
    """

    text: str
    row: AnswerRow
    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    last_turn: int
    stopped: bool
    turns: tuple[dict[str, Any], ...] = ()


class Reward(Protocol):
    """A named reward."""

    @property
    def name(self) -> str:
        """Name in the job."""

    def __call__(self, answers: Sequence[PolicyAnswer]) -> list[float]:
        """Returns the reward of each answer."""


@dataclass(frozen=True)
class ScorerReward:
    """A scorer of `stoker.scoring.scorers` as a reward."""

    name: str
    scorer: Scorer

    def __call__(self, answers: Sequence[PolicyAnswer]) -> list[float]:
        """Scores answers; see `Reward`.

        Raises:
            UserError: an answer cannot be scored; the error names the row's place.
        """
        texts, rows = [answer.text for answer in answers], [answer.row for answer in answers]
        if self.scorer.batch is not None:
            scores = self.scorer.batch(texts, rows, [answer.ids for answer in answers]) if texts else []
        elif self.scorer.waits:
            with ConcurrentCalls[Score]() as calls:
                called = [calls.submit(partial(self.scorer.score, *each)) for each in zip(texts, rows, strict=True)]
                scores = [call.result() for call in called]
        else:
            scores = list(map(self.scorer.score, texts, rows))
        return [score.value for score in scores]


@dataclass(frozen=True)
class LengthReward:
    """1 for an answer of ``shortest`` to ``longest`` tokens.

    Each token outside the range costs its share of the nearer bound; the least reward is 0.
    """

    name: str
    shortest: int
    longest: int

    def __call__(self, answers: Sequence[PolicyAnswer]) -> list[float]:
        """Scores answers; see `Reward`."""
        return [self._of(answer.last_turn) for answer in answers]

    def _of(self, tokens: int) -> float:
        bound = min(max(tokens, self.shortest), self.longest)
        return max(0.0, 1.0 - abs(tokens - bound) / bound)


@dataclass(frozen=True)
class Rewards:
    """The rewards of a job with their weights."""

    weighted: tuple[tuple[Reward, float], ...]

    def __call__(self, answers: Sequence[PolicyAnswer]) -> tuple[list[dict[str, float]], list[float]]:
        """Returns each answer's rewards by name, and their weighted sum.

        Raises:
            UserError: a reward fails or is not finite; the error names the row's place.
        """
        parts = {reward.name: reward(answers) for reward, _ in self.weighted}
        for name, values in parts.items():
            for value, answer in zip(values, answers, strict=True):
                if not math.isfinite(value):
                    raise UserError(
                        answer.row.problem(f"the reward {name} returned {value}", "a reward must be a finite number")
                    )
        sums = [sum(weight * parts[reward.name][i] for reward, weight in self.weighted) for i in range(len(answers))]
        return [{name: values[i] for name, values in parts.items()} for i in range(len(answers))], sums


def reward_problem(name: str, base: Path) -> Problem | None:
    """Returns why there is no reward function of a name; None if no reason is seen. The user's code is not imported."""
    kind, _, argument = name.partition(":")
    if kind != LENGTH:
        return scorer_problem(name, base)
    try:
        length_reward(argument)
    except UserError as error:
        return error.problems[0]
    return None


def length_reward(argument: str) -> LengthReward:
    """Parses the reward ``length:TOKENS`` or ``length:MIN-MAX``.

    Raises:
        UserError: these are not positive numbers in order.
    """
    shortest, dash, longest = argument.partition("-")
    bounds = [
        int(each) if each.isascii() and each.isdigit() else 0 for each in (shortest, longest if dash else shortest)
    ]
    if not 0 < bounds[0] <= bounds[1]:
        message = (
            f"the reward length:{argument} must have a number of tokens, or a range from the shortest to the longest"
        )
        raise UserError(Problem(message, "write length:40, or length:20-60"))
    return LengthReward(f"length:{argument}", *bounds)
