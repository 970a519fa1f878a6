"""Regular expressions of the user's over answers, with a time limit: a pattern may take exponential time."""

from __future__ import annotations

from typing import Any

import regex

from stoker.errors import Problem, UserError

PATTERN_SECONDS = 5.0  # on one text
SHOWN = 40  # characters of a pattern


def compiled(pattern: str) -> Any:
    """Compiles a pattern.

    Raises:
        UserError: it is not a regular expression.
    """
    try:
        return regex.compile(pattern)
    except regex.error as error:
        raise UserError(f"{pattern!r} is not a regular expression: {error}") from error
    except RecursionError as error:
        raise UserError(f"{pattern[:SHOWN]!r} is not a regular expression: it is nested too deeply") from error


def is_found(pattern: Any, text: str) -> bool:
    """Returns whether a compiled pattern is found in a text.

    Raises:
        UserError: it took more than `PATTERN_SECONDS`, or too much memory.
    """
    try:
        return pattern.search(text, timeout=PATTERN_SECONDS) is not None
    except TimeoutError as error:
        message = f"the regular expression {pattern.pattern!r} took more than {PATTERN_SECONDS:g} s on an answer"
        raise UserError(Problem(message, "write one without nested repetitions")) from error
    except MemoryError as error:
        message = f"the regular expression {pattern.pattern!r} took too much memory on an answer"
        raise UserError(Problem(message, "write one without nested repetitions")) from error
