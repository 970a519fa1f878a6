"""Checks that rewards can compare with a row's expected answer, before there are answers to score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from stoker.errors import UserError
from stoker.scoring.answer_rows import AnswerRow
from stoker.scoring.scorer import Scorer, needs_expected
from stoker.scoring.scorers import scorer_of

PARTICULAR = ("numeric", "regex", "json_schema")  # kinds of scorers that need an expected answer of a certain form


@dataclass(frozen=True)
class ExpectedCheck:
    """A check of expected answers that can be sent to worker processes.

    Attributes:
        rewards: names of the scorers that compare with them.
    """

    rewards: tuple[str, ...]

    def __call__(self, expected: Any) -> str:
        """Returns why a reward cannot compare with an expected answer; empty if all can."""
        row = AnswerRow("", 0, (), expected, scorers=(), fields={})
        for scorer in _particular(self.rewards):
            try:
                scorer.score("", row)
            except UserError as error:
                return error.problems[0].message
        return ""


def expected_check(rewards: Sequence[str]) -> ExpectedCheck | None:
    """Returns the check of the expected answers that rewards compare with; None if none does."""
    comparing = tuple(filter(needs_expected, rewards))
    return ExpectedCheck(comparing) if comparing else None


@cache
def _particular(rewards: tuple[str, ...]) -> list[Scorer]:
    return [scorer_of(name, Path()) for name in rewards if name.partition(":")[0] in PARTICULAR]
