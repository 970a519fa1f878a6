"""A scorer, and its result."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from stoker.errors import Problem, UserError
from stoker.scoring.answer_rows import AnswerRow
from stoker.scoring.judge import Judge

# The scorers as `--score` takes them.
SCORERS = (
    *("exact", "normalised", "regex[:PATTERN]", "json_schema[:FILE]", "numeric[:TOLERANCE]"),
    *("rouge[:rouge1|rouge2|rougeL]", "chrf", "code[:SECONDS]", "language:CODE"),
    *("python:MODULE:FUNCTION", "judge:URL[,MODEL]"),
)
# Kinds of scorers that compare with the row's expected answer: always, and where they have no argument.
COMPARING = ("exact", "normalised", "numeric", "rouge", "chrf", "judge")
COMPARING_WITHOUT_ARGUMENT = ("regex", "json_schema")
INSTALL = "pip install 'stoker[evaluate]'"


@dataclass(frozen=True)
class Score:
    """Score of an answer, from 0 to 1, and optionally a reason.

    Attributes:
        counts: whether means count it; false for a judge's unclear verdict, whose value is that of a tie.
    """

    value: float
    why: str = ""
    counts: bool = True


class BatchFunction(Protocol):
    """A function that scores several answers together."""

    def __call__(
        self, answers: Sequence[str], rows: Sequence[AnswerRow], ids: Sequence[Sequence[int]] | None = None
    ) -> list[Score]:
        """
        Args:
            ids: tokens of the answers; None if they are not known.
        """


Function = Callable[[str, AnswerRow], Score]


@dataclass(frozen=True)
class Scorer:
    """A scorer as the user named it.

    Attributes:
        judge: compares two answers as well; None for other scorers.
        batch: scores several answers together; None for scorers of single answers.
        waits: whether it waits for another process or machine, so that several answers may be scored concurrently.
    """

    name: str
    score: Function
    judge: Judge | None = None
    batch: BatchFunction | None = None
    waits: bool = False

    @property
    def needs_expected(self) -> bool:
        """Whether rows without an expected answer have no score."""
        return needs_expected(self.name)


def needs_expected(name: str) -> bool:
    """Returns whether the scorer of a name gives no score to rows without an expected answer; imports nothing."""
    kind, _, argument = name.partition(":")
    return kind in COMPARING or (kind in COMPARING_WITHOUT_ARGUMENT and not argument)


def require_package(module: str, name: str) -> None:
    """Raises UserError with the install command where a scorer's package is missing."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise UserError(Problem(f"the scorer {name} needs the package {module.replace('_', '-')}", INSTALL)) from error
