"""Errors in the user's input: one clear message with its place, never a traceback."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LONGEST_REASON = 300  # characters


@dataclass(frozen=True)
class UnknownColumns:
    """The columns of a data file that fit no known format.

    Attributes:
        names: in the file.
        needed: columns of the nearest format, each with the most similar name of the file; empty if none is.
    """

    names: tuple[str, ...]
    needed: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Problem:
    """An error in the user's input: its position, a message, and a suggestion.

    Attributes:
        message: what is wrong, in one sentence.
        suggestion: what to write or do instead; empty if nothing better than the message can be said.
        key: dotted path of the job's key, such as ``train.lr`` or ``data[0].path``; empty outside a job.
        file: the file it is in; empty for the command line.
        line, column: counted from 1; 0 if there is no such place.
        repeats: whether another problem states the same for another place, so that this one is not printed.
        columns: of a data file, if they are the problem.
        missing_file: the name of a file that would have to be given, too; empty for none.
    """

    message: str
    suggestion: str = ""
    key: str = ""
    file: str = ""
    line: int = 0
    column: int = 0
    repeats: bool = False
    columns: UnknownColumns | None = None
    missing_file: str = ""

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

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.problems, self.__dict__  # the places survive the way between processes


class CannotRun(UserError):
    """The job is well written but cannot fit or be scheduled here. Exit code 3."""

    exit_code = 3


class CodeFailed(UserError):
    """A function of the user's raised an exception, or returned what it must not."""


class RunFailed(UserError):
    """The run ended for a reason that is not the user's input: disk full, loss not finite. Exit code 1."""

    exit_code = 1


class Interrupted(Exception):
    """Signal ``number`` ended the processes of a run before they had an outcome.

    Attributes:
        keeps: whether the newest state in memory is kept if no checkpoint has it.
    """

    def __init__(self, number: int, *, keeps: bool = False) -> None:
        super().__init__(f"ended by {signal_name(number)}")
        self.number, self.keeps = number, keeps


class Ended(Exception):
    """The command ends with ``exit_code``; all messages have been printed."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"exit code {exit_code}")
        self.exit_code = exit_code


class DiskFailed(RunFailed):
    """The run's files cannot be written, as the disk is full or missing."""


def did_you_mean(word: str, options: Iterable[str], cutoff: float = 0.5) -> str:
    """Returns ``did you mean X?`` with the option most like a word; empty if none is similar."""
    from difflib import get_close_matches  # loaded only for an error

    near = get_close_matches(word, options, 1, cutoff)
    return f"did you mean {near[0]}?" if near else ""


@contextmanager
def placed_errors(place: Callable[[Problem], Problem], of: type[UserError] = UserError) -> Iterator[None]:
    """Gives the problems of an error raised within a place; the error keeps its exit code and its notes.

    Args:
        of: errors that get the place; others are raised as they are.
    """
    try:
        yield
    except of as error:
        kind = next(
            kind for kind in (CannotRun, CodeFailed, DiskFailed, RunFailed, UserError) if isinstance(error, kind)
        )
        placed = kind(*(place(problem) for problem in error.problems))
        for note in getattr(error, "__notes__", ()):
            placed.add_note(note)
        raise placed from error


@contextmanager
def user_file_errors(what: str) -> Iterator[None]:
    """Turns what a library raises while it reads a file of the user's into a `UserError` that names the file.

    Libraries raise anything at all over a damaged file. The block holds calls of a library and nothing of Stoker's,
    whose own errors are bugs and keep their tracebacks.

    Args:
        what: that which is read, with the name of its file.
    """
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        raise UserError(Problem(f"{what} cannot be read: {reason_of(error)}")) from error


def chained(error: BaseException) -> Iterator[BaseException]:
    """Yields an error and the errors that led to it, each once: such chains can be circular.

    These are its cause, the error during which it was raised, and the processes' errors that
    torch.distributed.checkpoint wraps.
    """
    waiting, seen = [error], set[int]()
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        waiting += [inner for inner in (each.__context__, each.__cause__) if inner is not None]
        waiting += reversed(_wrapped_in(each))


def _wrapped_in(error: BaseException) -> list[BaseException]:
    """Returns the errors in a `CheckpointException`; none for other errors, whose ``failures`` may be anything."""
    failures = getattr(error, "failures", None)
    pairs = [pair for pair in failures.values() if isinstance(pair, tuple)] if isinstance(failures, dict) else []
    return [inner for pair in pairs for inner in pair[:1] if isinstance(inner, BaseException)]


def typed_reason(error: BaseException) -> str:
    """Returns an exception's type and message as one line of limited length, for code that is not Stoker's."""
    name, text = type(error).__name__, str(error)
    return _one_line(f"{name}: {text}" if text else name)


def signal_name(number: int) -> str:
    """Returns the name of a signal; its number if it is one of a program's own (a real-time signal)."""
    names = {known.value: known.name for known in signal.Signals}
    return names.get(number, f"signal {number}")


def raised_in(error: BaseException) -> str:
    """Describes an exception that a user's function raised: its type, its message, and the last line in their file.

    The traceback must begin in the caller of the function, so call this where the exception is caught.
    """
    import traceback  # loaded only for an error

    frames = traceback.extract_tb(error.__traceback__)[1:]
    # A module is called through torch and the wrappers of a layout.
    libraries = [Path(path).parent for path in (__file__, _file_of("torch")) if path]
    theirs = [frame for frame in frames if not any(map(Path(frame.filename).is_relative_to, libraries))] or frames
    own = [frame for frame in theirs if frame.filename == theirs[0].filename]
    return f"{typed_reason(error)} at {Path(own[-1].filename).name}:{own[-1].lineno}" if own else typed_reason(error)


def _file_of(module: str) -> str | None:
    return getattr(sys.modules.get(module), "__file__", None)


def reason_of(error: BaseException) -> str:
    """Returns an exception's message as one line of limited length."""
    if isinstance(error, KeyError):
        return _one_line(f"{error} is missing")
    if isinstance(error, OSError | ValueError | RuntimeError | ImportError) or type(error) is Exception:
        return _one_line(str(error))
    return typed_reason(error)


def _one_line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON].rpartition(' ')[0]} ..."
