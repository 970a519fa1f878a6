"""What answers are worth: the rewards of a job, each by itself and weighted together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from stoker.errors import Problem, UserError
from stoker.job.load_job import LoadedJob
from stoker.scoring.answer_rows import AnswerRow
from stoker.scoring.scorers import Scorer


@dataclass(frozen=True)
class Answer:
    """An answer as rewards see it.

    Attributes:
        text: without special tokens.
        row: of its prompt.
        prompt_ids, ids: token ids.
        stopped: whether it ended with a stop token.
    """

    text: str
    row: AnswerRow
    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    stopped: bool


class Reward(Protocol):
    """A reward by name."""

    @property
    def name(self) -> str:
        """As the job has it."""

    def __call__(self, answers: Sequence[Answer]) -> list[float]:
        """The reward of each answer."""


@dataclass(frozen=True)
class ScorerReward:
    """A scorer of `stoker.scoring.scorers` as a reward."""

    name: str
    scorer: Scorer

    def __call__(self, answers: Sequence[Answer]) -> list[float]:
        """See `Reward`.

        Raises:
            UserError: an answer cannot be scored, with the row's place.
        """
        for answer in answers:
            if self.scorer.needs_expected and not answer.row.accepted:
                message = f"the reward {self.name} compares with an expected answer, and this row has none"
                raise UserError(answer.row.problem(message, "give the row a column `expected`, or an assistant's turn"))
        return [self.scorer.score(answer.text, answer.row).value for answer in answers]


@dataclass(frozen=True)
class LengthReward:
    """1 for an answer of ``target`` tokens, less the share by which it misses them; never below 0."""

    name: str
    target: int

    def __call__(self, answers: Sequence[Answer]) -> list[float]:
        """See `Reward`."""
        return [max(0.0, 1.0 - abs(len(answer.ids) - self.target) / self.target) for answer in answers]


@dataclass(frozen=True)
class Rewards:
    """The rewards of a job with their weights."""

    weighted: tuple[tuple[Reward, float], ...]

    def __call__(self, answers: Sequence[Answer]) -> tuple[list[dict[str, float]], list[float]]:
        """Each reward of each answer by name, and their weighted sum."""
        parts = {reward.name: reward(answers) for reward, _ in self.weighted}
        sums = [sum(weight * parts[reward.name][i] for reward, weight in self.weighted) for i in range(len(answers))]
        return [{name: values[i] for name, values in parts.items()} for i in range(len(answers))], sums


def length_reward(argument: str) -> LengthReward:
    """The reward ``length:TOKENS``.

    Raises:
        UserError: it names no positive number.
    """
    if not argument.isdigit() or int(argument) < 1:
        raise UserError(Problem(f"the reward length:{argument} names no number of tokens", "write length:40"))
    return LengthReward(f"length:{argument}", int(argument))


Opener = Callable[[str, LoadedJob], Reward]
