"""When the processes of a node are ended, and what counts as their outcome; the processes only have exit codes."""

from __future__ import annotations

import signal
import time
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import pytest

from stoker.errors import Problem
from stoker.launch.cluster_env import RankInfo
from stoker.launch.first_failure import Failure
from stoker.launch.processes import GRACE, Processes
from stoker.train.run_result import RunResult

RESULT = RunResult("done", 9, 10, None, 2.0, 1.0, None, None, None, None, True, 0)


def processes_of(codes: list[int | None], *, asked: list[int] | None = None, sent: dict[int, Any] | None = None) -> Any:
    """Processes with these exit codes, of which some have sent something."""
    made: Any = Processes(None, [RankInfo(r, 2, r, 2) for r in range(2)], b"", asked=asked or [])  # type: ignore[arg-type]
    for rank, code in enumerate(codes):
        ours, theirs = Pipe(duplex=False)
        if rank in (sent or {}):
            theirs.send((sent or {})[rank])
        theirs.close()
        made._endings.append(ours)
        made._processes.append(SimpleNamespace(exitcode=code, pid=None, kill=lambda: None, join=lambda: None))
    return made


def left(processes: Any) -> float:
    """Seconds until the processes are killed."""
    return float(processes._deadline - time.monotonic())


@pytest.mark.parametrize(
    ("code", "asked", "grace"),
    [
        (1, [], GRACE),  # the others may have the same to say
        (-9, [], 0.0),  # they only miss it
        (-9, [signal.SIGTERM], GRACE),  # they save
        (None, [signal.SIGINT, signal.SIGINT], GRACE),
    ],
)
def test_others_get_a_while_to_end_where_they_have_something_to_do(
    code: int | None, asked: list[int], grace: float
) -> None:
    processes = processes_of([code, None], asked=asked)
    processes.look()
    assert left(processes) == pytest.approx(grace, abs=0.5)


def test_one_signal_ends_nothing_at_once() -> None:
    processes = processes_of([None, None], asked=[signal.SIGTERM])
    processes.look()
    assert processes._deadline is None


def test_the_shortest_time_that_was_given_counts() -> None:
    processes = processes_of([None, None])
    for seconds, expected in ((30.0, 30.0), (2.0, 2.0), (30.0, 2.0)):
        processes.end(seconds)
        assert left(processes) == pytest.approx(expected, abs=0.5)


def test_a_result_counts_only_if_no_process_failed() -> None:
    assert processes_of([0, 0], sent={0: RESULT}).ending() == RESULT
    assert processes_of([0, 1], sent={0: RESULT}).ending() is None
    assert processes_of([0, 0]).ending() is None


def test_processes_that_were_ended_here_or_told_why_have_no_other_failure() -> None:
    told = Failure(1, 0.0, "RunFailed", (Problem("the disk is gone"),))
    for code, sent, expected in ((1, {1: told}, [told]), (0, {}, []), (128 + signal.SIGTERM, {}, [])):
        processes = processes_of([0, code], sent=sent)
        processes.look()
        assert processes.failures(set()) == expected
    processes = processes_of([-9, None])
    processes.look()
    processes.kill()
    processes._processes[1].exitcode = -9  # ended here
    processes.look()
    assert [failure.rank for failure in processes.failures(set())] == [0]
    assert processes.failures({0}) == []  # it wrote one itself
