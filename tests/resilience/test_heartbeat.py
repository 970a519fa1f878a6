"""Signs of life: what was written is what is read, in another process too, and waiting is not a process' own time."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from stoker.resilience import heartbeat
from stoker.resilience.heartbeat import Heart, Listener, heart_file


def work(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert Listener(tmp_path).pulse(3) is None
    heart = Heart(tmp_path, 3)
    pulse = Listener(tmp_path).pulse(3)
    assert pulse is not None and (pulse.phase, pulse.done, pulse.steps) == ("start", -1, 0)
    heart.restored(7)
    heart.beat("train", 8)
    before = time.monotonic()
    heart.beat("optimizer", 8)
    heart.beat("save", 8)
    pulse = Listener(tmp_path).pulse(3)
    assert pulse is not None and (pulse.phase, pulse.step, pulse.done, pulse.steps) == ("save", 8, 8, 1)
    assert before <= pulse.beat <= time.monotonic()
    time.sleep(0.05)
    heart.beat("data", 9)
    assert (Listener(tmp_path).pulse(3) or pulse).save >= 0.05


def test_a_heartbeat_is_read_after_its_file_was_removed(tmp_path: Path) -> None:
    heart, listener = Heart(tmp_path, 0), Listener(tmp_path)
    assert listener.pulse(0) is not None
    heart_file(tmp_path, 0).unlink()
    heart.beat("train", 8)
    pulse = listener.pulse(0)
    assert pulse is not None and (pulse.phase, pulse.step) == ("train", 8)
    listener.close()


def test_waiting_is_not_a_process_own_time_but_reading_and_computing_are(tmp_path: Path) -> None:
    heart = Heart(tmp_path, 0)
    for step in (1, 2):
        heart.beat("data", step)
        time.sleep(0.1)  # a disk
        heart.beat("train", step)
        work(0.2)
        time.sleep(0.4)  # the others
        heart.beat("optimizer", step)
    heart.beat("data", 3)
    pulse = Listener(tmp_path).pulse(0)
    assert pulse is not None and pulse.steps == 2
    # What the thread waits for a processor counts as well; that is little unless the machine is full.
    assert 2 * 0.29 < pulse.own < pulse.slowest * 2 - 2 * 0.35
    assert pulse.slowest > 0.7


def test_a_heartbeat_outlives_its_process(tmp_path: Path) -> None:
    code = "import os, pathlib; from stoker.resilience.heartbeat import Heart; "
    code += f"Heart(pathlib.Path({str(tmp_path)!r}), 1).beat('evaluate', 5); os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    pulse = Listener(tmp_path).pulse(1)
    assert pulse is not None and (pulse.phase, pulse.step) == ("evaluate", 5)


@pytest.mark.parametrize("watched", [True, False])
def test_a_sign_costs_next_to_nothing(tmp_path: Path, watched: bool) -> None:
    heart = Heart(tmp_path, 0) if watched else Heart()
    begin = time.thread_time()
    for step in range(500):
        heart.beat("train", step)
    assert (time.thread_time() - begin) / 500 < 5e-4  # alone on the machine: 3e-5, and 2e-7 unwatched


def test_the_longest_phases_and_the_slowest_step_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit that follows the last one would take a long save for a hang."""
    now = 100.0
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now)
    heart = Heart(tmp_path, 0)
    for step, seconds in ((1, 7.0), (2, 2.0)):
        for phase in ("rollouts", "data", "train", "optimizer", "evaluate", "save"):
            heart.beat(phase, step)
            now += seconds
    heart.beat("data", 3)
    pulse = Listener(tmp_path).pulse(0)
    assert pulse is not None and (pulse.rollouts, pulse.evaluate, pulse.save, pulse.slowest) == (7.0, 7.0, 7.0, 21.0)


def test_the_own_time_of_a_process_with_a_gpu_is_its_devices(tmp_path: Path) -> None:
    """While it waits for others in a collective, its thread may be busy."""
    heart = Heart(tmp_path, 0, device_seconds=lambda: 0.25)
    for phase in ("data", "train"):
        heart.beat(phase, 1)
    work(0.1)
    for phase in ("optimizer", "data"):
        heart.beat(phase, 1)
    pulse = Listener(tmp_path).pulse(0)
    assert pulse is not None and pulse.own == pytest.approx(0.5, abs=0.05)
