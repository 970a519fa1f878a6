"""Finds the process that failed first among several, and the error that the user gets."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from stoker.errors import CannotRun, CodeFailed, DiskFailed, Ended, Problem, RunFailed, UserError, signal_name
from stoker.files import replace_file
from stoker.hardware.machine_limits import is_peer_gone, machine_problem
from stoker.node_cache.download import ObjectChanged

USER_ERRORS = {kind.__name__: kind for kind in (UserError, CannotRun, CodeFailed, RunFailed, DiskFailed, ObjectChanged)}
# PyTorch's exceptions for failed communication between the processes, or for a GPU that does not answer.
NETWORK = ("DistError", "DistNetworkError", "DistStoreError", "DistBackendError", "AcceleratorError", "ConnectionError")


class RankFailed(RunFailed):
    """A process of the run was killed or met a bug, whose traceback is the exception's note."""


class LeftToAnother(Ended):
    """This process failed, and another one reports why."""


@dataclass(frozen=True)
class Failure:
    """The failure of one process.

    Attributes:
        rank: of the process.
        time: seconds since 1970.
        kind: name of the exception's class; ``exit`` if the process had no time to raise one, ``hung`` if it
            stopped without ending.
        problems: the messages for the user.
        consequence: whether it failed only because another process had gone.
        traceback: of an unexpected error, or of one in a user's code; else empty.
    """

    rank: int
    time: float
    kind: str
    problems: tuple[Problem, ...]
    consequence: bool = False
    traceback: str = ""

    def write(self, path: Path) -> None:
        """Writes it as JSON, atomically: a reader sees all of it or nothing."""
        replace_file(path, json.dumps(asdict(self), ensure_ascii=False))

    @classmethod
    def read(cls, path: Path) -> Failure:
        """Reads a failure that `write` wrote."""
        return cls.of(json.loads(path.read_text(encoding="utf-8")))

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Failure:
        """Restores a failure from the output of `dataclasses.asdict`."""
        return cls(**{**values, "problems": tuple(Problem(**problem) for problem in values["problems"])})


def failure_of_exit(rank: int, pid: int | None, exit_code: int | None) -> Failure:
    """Returns the failure of a process that ended without a report; a negative code is the signal that killed it."""
    how = f"ended with exit code {exit_code}"
    if exit_code is not None and exit_code < 0:
        how = f"was killed by {signal_name(-exit_code)}"
    return Failure(rank, time.time(), "exit", (Problem(f"process {pid} {how}"),))


def failure_of_hang(rank: int, pid: int | None, *, phase: str, step: int, silent: float) -> Failure:
    """Returns the failure of a process without a heartbeat for ``silent`` seconds."""
    words = f"process {pid} stopped in step {step}, at `{phase}`: no sign of life for {silent:.0f} s"
    return Failure(rank, time.time(), "hung", (Problem(words),))


def failure_of(error: BaseException, rank: int) -> Failure:
    """Returns an exception of this process, in a form that other processes can read."""
    if isinstance(error, UserError) and type(error).__name__ in USER_ERRORS:
        notes = "".join(getattr(error, "__notes__", ()))
        return Failure(rank, time.time(), type(error).__name__, error.problems, traceback=notes)
    lacking = machine_problem(error)
    if lacking is not None:
        return Failure(rank, time.time(), type(error).__name__, (lacking,))
    words = f"{type(error).__name__}: {error}".strip().removesuffix(":")
    text = "".join(traceback.format_exception(error))
    return Failure(rank, time.time(), type(error).__name__, (Problem(words),), is_peer_gone(error), text)


def passes_by(failure: Failure, *, steps: int) -> bool:
    """Returns whether a restart may avoid the failure.

    User errors recur: wrong input, a missing device, a loss that is not finite. So does a bug before the first step.

    Args:
        steps: steps that the processes had done since they were started.
    """
    if failure.kind in ("exit", "hung") or failure.consequence:
        return True
    return failure.kind not in USER_ERRORS and (steps > 0 or failure.kind in NETWORK)


def first_of(failures: Sequence[Failure]) -> Failure:
    """Returns the failure that caused the others."""
    return min(failures, key=lambda failure: (failure.consequence, failure.time))


def error_of(failures: Sequence[Failure], *, world: int, where: str = "", beside: Sequence[Problem] = ()) -> UserError:
    """Returns the first failure as an exception of its class; it names the rank unless all processes failed alike.

    Args:
        world: processes of the run.
        where: a hint to further information, after an unexpected error.
        beside: problems that may be the cause, which the processes themselves do not know.
    """
    first = first_of(failures)
    kind = USER_ERRORS.get(first.kind, RankFailed)
    together = len(failures) == world and len({(f.kind, f.problems) for f in failures}) == 1
    prefix = "" if together and kind is not RankFailed else f"rank {first.rank}: "
    problems = [replace(problem, message=prefix + problem.message) for problem in first.problems]
    if kind is RankFailed:
        problems = [replace(problem, suggestion=where) for problem in problems]
    error = kind(*problems, *beside)
    if first.traceback:
        error.add_note(first.traceback)
    return error
