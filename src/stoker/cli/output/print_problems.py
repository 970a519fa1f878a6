"""Problems and notes on stderr, as every command prints them."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from stoker.errors import Problem


def print_problems(problems: Iterable[Problem]) -> None:
    """Prints problems, except those that repeat another one."""
    for problem in problems:
        if not problem.repeats:
            print(f"error: {problem}", file=sys.stderr)


def print_notes(error: BaseException) -> None:
    """Prints the notes of an exception."""
    for note in getattr(error, "__notes__", ()):
        print(note.rstrip("\n"), file=sys.stderr)
