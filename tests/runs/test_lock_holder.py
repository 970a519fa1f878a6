"""The process that trains in a run's folder, and the request that it ends."""

from __future__ import annotations

import subprocess
from pathlib import Path

import psutil
import pytest

from stoker.cli.main import main
from stoker.job.run_records import LOCK
from stoker.runs.lock_holder import ask_to_stop, holder_of
from stoker.runs.run_folder import RunFolder


def test_the_process_with_the_lock_is_found(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    assert holder_of(folder) is None
    folder.path.mkdir()
    (folder.path / LOCK).touch()
    assert holder_of(folder) is None
    with folder.take():
        assert holder_of(folder) == psutil.Process()
    assert holder_of(folder) is None


def test_a_process_that_has_just_ended_counts_as_asked() -> None:
    with subprocess.Popen(["sleep", "60"]) as started:
        process = psutil.Process(started.pid)
        assert ask_to_stop(process)
        started.wait()
        assert ask_to_stop(process)


def test_the_run_of_another_user_is_not_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(process: psutil.Process) -> None:
        raise psutil.AccessDenied(process.pid)

    folder = RunFolder(tmp_path / "run")
    monkeypatch.setattr(psutil.Process, "terminate", refuse)
    with folder.take():
        folder.write_job("task: sft\n")
        folder.event("started")
        assert main(["stop", str(folder.path)]) == 1
    assert "is not on this machine, or another user's" in capsys.readouterr().err
