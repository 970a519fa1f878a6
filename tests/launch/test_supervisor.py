"""What becomes of a run whose processes die, stop or fail: started again, given up, or gone on with without one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starting import assert_gone, begin, end_all, process_ids

from stoker.resilience.driver_log import UNREADABLE
from stoker.resilience.stop_signals import STOPPED_BEFORE
from stoker.runs.run_folder import RunFolder
from stoker.runs.shm_folder import shared_folder

pytestmark = [pytest.mark.pool, pytest.mark.usefixtures("warm_processes")]


@pytest.fixture(autouse=True)
def none_left() -> Iterator[None]:
    yield
    end_all()


def ran(base: Path, entry: str, faults: str) -> tuple[int, str, str]:
    process = begin(base, entry, faults)
    out, err = process.communicate(timeout=120)
    assert not shared_folder(base / "run").exists()
    return process.returncode, out, err


def events(base: Path, name: str) -> list[dict[str, Any]]:
    return [event for event in RunFolder(base / "run").read_events() if event["event"] == name]


def test_a_killed_rank_is_started_again_and_progress_resets_the_count(tmp_path: Path) -> None:
    code, out, err = ran(tmp_path, "die_once_and_again", "restarts: 1, back_off: 0.2")
    assert (code, out.splitlines()[-1]) == (0, "done 10"), err
    faults, restarts = events(tmp_path, "fault"), events(tmp_path, "restarted")
    assert [(e["rank"], e["cause"], e["step"], e["restart"]) for e in faults] == [(1, "exit", 3, 1), (1, "exit", 6, 1)]
    assert [e["attempt"] for e in restarts] == [1, 2]
    # The first step that was seen done: steps here are as short as the time between two looks.
    assert [e["step"] - at in (1, 2, 3) for e, at in zip(restarts, (3, 6), strict=True)] == [True, True]
    for event in restarts:
        assert event["seconds"] == pytest.approx(sum(event["split"].values()), abs=0.01)
        assert event["split"]["started"] > 0.2  # the back-off is in it
    assert "was killed by SIGKILL" in out and "starting again (1 of 1)" in out


def test_a_fault_after_shared_memory_was_removed_does_not_end_the_run(tmp_path: Path) -> None:
    code, out, err = ran(tmp_path, "lose_the_memory", "restarts: 1, back_off: 0")
    assert (code, out.splitlines()[-1]) == (0, "done 10"), err
    assert [(e["cause"], e["step"]) for e in events(tmp_path, "fault")] == [("ZeroDivisionError", 3)]
    assert len(events(tmp_path, "restarted")) == 1


@pytest.mark.slow
def test_a_rank_that_dies_every_time_is_given_up(tmp_path: Path) -> None:
    begun = time.monotonic()
    code, _, err = ran(tmp_path, "die_always", "restarts: 2, back_off: 0.2")
    assert code == 1 and "rank 1: process" in err and "was killed by SIGKILL" in err
    assert (tmp_path / "starts").read_text().count("1 of 2") == 3
    assert [e["back_off"] for e in events(tmp_path, "fault")] == [0.2, 0.4]
    assert len(events(tmp_path, "failed")) == 1 and time.monotonic() - begun < 60


def test_without_restarts_the_first_death_ends_the_run(tmp_path: Path) -> None:
    code, _, _ = ran(tmp_path, "die_always", "restarts: 0")
    assert code == 1 and (tmp_path / "starts").read_text().count("1 of 2") == 1


@pytest.mark.slow
def test_a_bug_is_tried_again_once_and_an_error_for_the_user_never(tmp_path: Path) -> None:
    code, _, err = ran(tmp_path, "fail_at_a_step", "restarts: 5, back_off: 0")
    assert code == 1 and "ZeroDivisionError: a bug" in err
    assert (tmp_path / "starts-0").read_text() == "xx"  # the second start makes no step, and the bug is there again
    code, out, err = ran(tmp_path, "refuse_together", "restarts: 5")
    assert (code, out) == (2, "") and err == "UserError: job.yaml:2:1: no such thing; write another\n"
    assert len(events(tmp_path, "failed")) == 1  # that of the bug: the refused start made no step


def test_an_error_of_the_users_code_in_a_step_is_an_event_of_the_run(tmp_path: Path) -> None:
    code, _, _ = ran(tmp_path, "refuse_at_a_step", "restarts: 5")
    (event,) = events(tmp_path, "failed")
    assert (code, event["step"], event["error"]) == (2, 3, "UserError: the reward returned nan")


@pytest.mark.slow
def test_a_rank_that_dies_again_and_again_is_gone_on_without(tmp_path: Path) -> None:
    code, out, err = ran(tmp_path, "die_always", "restarts: 5, back_off: 0, lost: shrink")
    assert (code, out.splitlines()[-1]) == (0, "done 2"), err
    assert (tmp_path / "starts").read_text().splitlines()[-1] == "0 of 1"
    assert (tmp_path / "starts").read_text().count("1 of 2") == 2
    (event,) = events(tmp_path, "shrunk")
    assert (event["without"], event["was"], event["now"]) == ([1], "data 2", "data 1")


@pytest.mark.parametrize(("lost", "code"), [("shrink", 0), pytest.param("replace", 3, marks=pytest.mark.slow)])
def test_a_device_that_does_not_pass_its_test(tmp_path: Path, lost: str, code: int) -> None:
    got, _, err = ran(tmp_path, "bad_device", f"lost: {lost}")
    assert got == code, err
    assert code == 0 or "device 1 computes wrong matrix products" in err
    assert len(events(tmp_path, "shrunk")) == (code == 0)


def kernel_log(base: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's `dmesg` and `journalctl`."""
    (base / "log").write_text("[ 1.000000] NVRM: Xid (PCI:0000:00:00): 79, pid=1, before the run\n")
    for name in ("dmesg", "journalctl"):
        (base / name).write_text(f"#!/bin/sh\n{script}\n")
        (base / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{base}{os.pathsep}{os.environ['PATH']}")


def test_a_gpu_that_its_driver_gives_up_counts_as_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_log(tmp_path, f"cat {tmp_path}/log", monkeypatch)
    (tmp_path / "xid").write_text("79")
    code, out, err = ran(tmp_path, "lose_gpu", "restarts: 2, back_off: 0, lost: shrink")
    assert (code, out.splitlines()[-1]) == (0, "done 2"), err
    (fault,) = events(tmp_path, "gpu_fault")
    assert (fault["rank"], fault["device"], fault["xids"]) == (1, "0000:01:00", [79])
    assert (fault["kind"], fault["lost"]) == ("bus", True)
    (shrunk,) = events(tmp_path, "shrunk")
    assert shrunk["without"] == [1] and not events(tmp_path, "fault")
    assert "Xid 79 (GPU has fallen off the bus) for its GPU at 0000:01:00; switch the machine off" in out
    assert "\x1b" not in out


@pytest.mark.slow
def test_a_contained_memory_error_restarts_on_the_same_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_log(tmp_path, f"cat {tmp_path}/log", monkeypatch)
    (tmp_path / "xid").write_text("94")
    code, _, err = ran(tmp_path, "lose_gpu", "restarts: 1, back_off: 0")
    assert code == 1 and "was killed by SIGKILL" in err and "Xid 94 (contained memory error)" in err
    assert len(events(tmp_path, "fault")) == 1 and not events(tmp_path, "shrunk")
    assert [event["lost"] for event in events(tmp_path, "gpu_fault")] == [False, False]


def test_a_kernel_log_that_cannot_be_read_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_log(tmp_path, "exit 1", monkeypatch)
    (tmp_path / "xid").write_text("79")
    code, out, _ = ran(tmp_path, "lose_gpu", "restarts: 1, back_off: 0")
    assert code == 1 and out.count(UNREADABLE) == 1 and len(events(tmp_path, "fault")) == 1


def test_a_rank_that_stops_is_named_with_its_stack_and_started_again(tmp_path: Path) -> None:
    code, out, err = ran(tmp_path, "hang_once", "hang: 1.5, back_off: 0")
    assert (code, out.splitlines()[-1]) == (0, "done 6"), err
    (event,) = events(tmp_path, "hung")
    assert (event["rank"], event["phase"], event["step"]) == (1, "train", 4)
    assert event["silent_ranks"] in ([0, 1], [1])  # rank 0, which waits for it, may have spoken a moment later
    assert 1.5 <= event["silent"] < 10 and event["files"] == ["stack-0.txt", "stack-1.txt"]
    stacks = [(tmp_path / "run" / "logs" / f"stack-{rank}.txt").read_text() for rank in range(2)]
    assert "in its_own_work" in stacks[1] and "its_own_work" not in stacks[0]
    assert "in barrier" in stacks[0]
    (fault,) = events(tmp_path, "fault")
    assert (fault["rank"], fault["cause"]) == (1, "hung")


def test_the_deadline_ends_what_does_not_end(tmp_path: Path) -> None:
    process = begin(tmp_path, "wait_deaf", "deadline: 3")
    pids = process_ids(tmp_path, process)
    begun = time.monotonic()
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert out.splitlines()[-1] == STOPPED_BEFORE
    assert 1.5 < time.monotonic() - begun < 6  # alone on the machine: 2.3
    assert_gone(pids)


def test_a_signal_in_the_back_off_ends_the_run(tmp_path: Path) -> None:
    process = begin(tmp_path, "die_always", "restarts: 1, back_off: 100")
    assert process.stdout is not None
    while "starting again" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
