"""What is told to a user whose input is wrong: one clear message with its place, never a traceback."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: where it stands, what it is, what to write instead.

    Attributes:
        message: what is wrong, in one sentence.
        suggestion: what to write or do instead; empty where nothing better than the message can be said.
        key: dotted path of the job's key, such as ``train.lr`` or ``data[0].path``; empty outside a job.
        file: the file it stands in; empty for the command line.
        line, column: counted from 1; 0 where there is no such place.
    """

    message: str
    suggestion: str = ""
    key: str = ""
    file: str = ""
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        place = ":".join(str(part) for part in (self.file, self.line, self.column) if part)
        text = f"{place}: {self.message}" if place else self.message
        return f"{text}; {self.suggestion}" if self.suggestion else text


class UserError(Exception):
    """The user's input is wrong. Carries every problem found, not only the first. Exit code 2."""

    exit_code = 2

    def __init__(self, *problems: Problem | str) -> None:
        self.problems = tuple(p if isinstance(p, Problem) else Problem(p) for p in problems)
        super().__init__("\n".join(str(p) for p in self.problems))


class CannotRun(UserError):
    """The job is well written but cannot fit or be scheduled here. Exit code 3."""

    exit_code = 3


class RunFailed(UserError):
    """The run ended for a reason that is not the user's input: disk full, loss not finite. Exit code 1."""

    exit_code = 1
