"""Which of several failures is the error, in whose words, and that it survives being written down."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from stoker.errors import CannotRun, Problem, RunFailed, UserError
from stoker.launch.first_failure import Failure, RankFailed, error_of, failure_of, failure_of_exit, passes_by


def caught(error: Exception, rank: int, time: float) -> Failure:
    """A failure as a process that raised it tells it."""
    try:
        raise error
    except Exception as raised:
        return replace(failure_of(raised, rank), time=time)


PEER = RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:2717")


@pytest.mark.parametrize("kind", [UserError, CannotRun, RunFailed])
def test_an_error_for_a_user_keeps_its_class_place_and_words(kind: type[UserError], tmp_path: Path) -> None:
    error = kind(Problem("a", "b", key="k", file="job.yaml", line=3, column=5), Problem("c"))
    failures = [caught(error, rank, rank) for rank in range(2)]
    failures[0].write(tmp_path / "failure.json")
    assert Failure.read(tmp_path / "failure.json") == failures[0]
    together = error_of(failures, world=2)
    assert type(together) is kind and together.problems == error.problems
    alone = error_of(failures[1:], world=2)
    assert str(alone) == "job.yaml:3:5: rank 1: a; b\nrank 1: c"


def test_the_earliest_is_told_unless_it_follows_from_another() -> None:
    failures = [caught(PEER, 0, 1.0), caught(ValueError("second"), 2, 3.0), caught(ValueError("first"), 1, 2.0)]
    error = error_of(failures, world=4, where="its log is there")
    assert isinstance(error, RankFailed) and error.exit_code == 1
    assert str(error) == "rank 1: ValueError: first; its log is there"
    assert "raise error\nValueError: first" in error.__notes__[0]


def test_a_process_that_was_killed_is_told_before_those_that_missed_it() -> None:
    error = error_of([caught(PEER, 0, 1.0), failure_of_exit(1, 123, -9)], world=2)
    assert str(error) == "rank 1: process 123 was killed by SIGKILL"
    assert str(error_of([failure_of_exit(1, 123, -35)], world=2)) == "rank 1: process 123 was killed by signal 35"
    assert "rank 0: RuntimeError: [../gloo" in str(error_of([caught(PEER, 0, 1.0)], world=2))
    assert str(error_of([failure_of_exit(0, 7, 3)], world=1)) == "rank 0: process 7 ended with exit code 3"


@pytest.mark.parametrize(
    ("failure", "before", "later"),
    [
        (failure_of_exit(1, 7, -9), True, True),
        (failure_of(PEER, 0), True, True),
        (failure_of(ConnectionError("the port is taken"), 0), True, True),
        (failure_of(ValueError("a bug"), 0), False, True),
        (failure_of(UserError("no such file"), 0), False, False),
        (failure_of(CannotRun("no such device"), 0), False, False),
    ],
)
def test_a_restart_is_tried_where_it_may_help(failure: Failure, before: bool, later: bool) -> None:
    """Before the first step of a start, and after some."""
    assert (passes_by(failure, steps=0), passes_by(failure, steps=3)) == (before, later)
