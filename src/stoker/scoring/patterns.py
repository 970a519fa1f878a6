"""Regular expressions of the user's over answers, with a time limit: a pattern may take exponential time."""

from __future__ import annotations

from typing import Any

import regex

from stoker.errors import Problem, UserError
from stoker.scoring.answer_rows import AnswerRow

PATTERN_SECONDS = 5.0  # on one text


def compiled(pattern: str, row: AnswerRow | None = None) -> Any:
    """Compiles a pattern.

    Args:
        row: where it is written, if in a row.

    Raises:
        UserError: it is not a regular expression.
    """
    try:
        return regex.compile(pattern)
    except regex.error as error:
        message = f"{pattern!r} is not a regular expression: {error}"
        raise UserError(row.problem(message) if row else message) from error


def is_found(pattern: Any, text: str, row: AnswerRow | None = None) -> bool:
    """Returns whether a compiled pattern is found in a text.

    Args:
        row: row of the text, for the error.

    Raises:
        UserError: it took more than `PATTERN_SECONDS`.
    """
    try:
        return pattern.search(text, timeout=PATTERN_SECONDS) is not None
    except TimeoutError as error:
        message = f"the regular expression {pattern.pattern!r} took more than {PATTERN_SECONDS:g} s on an answer"
        hint = "write one without nested repetitions"
        raise UserError(row.problem(message, hint) if row else Problem(message, hint)) from error
