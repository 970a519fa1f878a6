"""Processes that a run starts: their results, logs, errors and signals, and that none of them is left behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from starting import assert_gone, begin, end_all, process_ids

pytestmark = [pytest.mark.pool, pytest.mark.usefixtures("warm_processes")]


@pytest.fixture(autouse=True)
def none_left() -> Iterator[None]:
    yield
    end_all()


def test_results_come_back_and_logs_are_kept(tmp_path: Path) -> None:
    process = begin(tmp_path, "answer")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert (out, err) == ("the display\ndone 1\n", "")  # of rank 0 its display, and no print of anybody
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    for rank in range(2):
        log = (tmp_path / "run" / "logs" / f"rank-{rank}.log").read_text()
        assert f"rank {rank} of 2" in log and "data 2" in log
        assert f"printed by {rank} with {threads} threads\na warning\n" in log


def test_a_killed_rank_ends_the_run_and_is_named(tmp_path: Path) -> None:
    process = begin(tmp_path, "wait_together")
    pids = process_ids(tmp_path, process)
    begun = time.monotonic()
    os.kill(pids[1], signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1 and time.monotonic() - begun < 30  # alone on the machine: 2
    assert err.startswith(f"RankFailed: rank 1: process {pids[1]} was killed by SIGKILL; its log is ")
    assert "run/logs/rank-1.log" in err and "Traceback" not in err
    assert_gone(pids)


def test_no_rank_outlives_a_killed_parent(tmp_path: Path) -> None:
    process = begin(tmp_path, "wait_together")
    pids = process_ids(tmp_path, process)
    process.kill()
    process.communicate(timeout=120)
    assert_gone(pids)


@pytest.mark.slow
def test_a_bug_is_told_once_and_a_deaf_rank_is_ended(tmp_path: Path) -> None:
    process = begin(tmp_path, "hang_deaf")
    pids = process_ids(tmp_path, process)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "RankFailed: rank 1: ZeroDivisionError: a bug; its log is " in err
    assert err.count("Traceback") == 1 and "in hang_deaf" in err
    assert "ZeroDivisionError: a bug" in (tmp_path / "run" / "logs" / "rank-1.log").read_text()
    assert_gone(pids)


def test_what_all_ranks_refuse_is_told_once(tmp_path: Path) -> None:
    process = begin(tmp_path, "refuse_together")
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (2, "UserError: job.yaml:2:1: no such thing; write another\n")
    log = (tmp_path / "run" / "logs" / "rank-1.log").read_text()
    assert log.endswith("\njob.yaml:2:1: no such thing; write another\n") and "Traceback" not in log


def test_the_first_failure_is_the_error_not_what_follows_from_it(tmp_path: Path) -> None:
    process = begin(tmp_path, "fail_after_a_peer")
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (1, "RunFailed: rank 1: the disk is full\n")


def test_a_failure_that_cannot_be_written_is_told_as_well(tmp_path: Path) -> None:
    process = begin(tmp_path, "fail_without_a_disk")
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (1, "RunFailed: rank 1: the disk is gone\n")


def test_a_log_that_cannot_be_written_is_the_error_and_not_tried_again(tmp_path: Path) -> None:
    (tmp_path / "run" / "logs" / "rank-1.log").mkdir(parents=True)  # as where the disk is full
    process = begin(tmp_path, "answer", "restarts: 1")
    _, err = process.communicate(timeout=120)
    words = f"DiskFailed: rank 1: {tmp_path}/run/logs cannot be written (Is a directory); earlier checkpoints are"
    assert process.returncode == 1 and words in err and "starting again" not in err


@pytest.mark.parametrize(
    ("number", "terminal"), [(signal.SIGTERM, False), (signal.SIGINT, True), (signal.SIGHUP, True)]
)
def test_a_signal_reaches_every_rank_once(tmp_path: Path, number: signal.Signals, terminal: bool) -> None:
    """Ctrl-C in a terminal goes to all processes of the foreground; the ranks are told by their parent alone."""
    process = begin(tmp_path, "stop_when_asked")
    process_ids(tmp_path, process)
    (os.killpg if terminal else os.kill)(process.pid, number)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out.splitlines()[1:], err) == (128 + number, ["stopped 3"], "")
    assert out.startswith("stopping after this step")
    assert [(tmp_path / f"asked-{rank}").read_text() for rank in range(2)] == [f"[{number}]"] * 2


@pytest.mark.slow
def test_a_second_signal_ends_the_run_at_once(tmp_path: Path) -> None:
    process = begin(tmp_path, "wait_deaf")
    pids = process_ids(tmp_path, process)
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGINT and time.monotonic() - begun < 30, err
    assert_gone(pids)
