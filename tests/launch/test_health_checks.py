"""Checks before training: those of the disk keep no run from going on that has begun."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from stoker.errors import CannotRun
from stoker.launch import health_checks
from stoker.launch.health_checks import check_disk
from stoker.runs.run_folder import RunFolder


def test_a_full_disk_stops_a_new_run_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder(tmp_path)
    free, rate = check_disk(run.checkpoints, 1000, run)
    assert free is not None and free > 1000 and rate
    with pytest.raises(CannotRun, match="has room for"):
        check_disk(run.checkpoints, 1 << 60, run)

    def over_quota(_: Path) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with monkeypatch.context() as full:
        full.setattr(health_checks, "measure_disk", over_quota)
        with pytest.raises(CannotRun, match="cannot be written"):
            check_disk(run.checkpoints, 1000, run)
    run.event("started")
    assert check_disk(run.checkpoints, 1 << 60, run)[0] == pytest.approx(free, rel=0.5)
    monkeypatch.setattr(health_checks, "measure_disk", over_quota)
    assert check_disk(run.checkpoints, 1000, run) == (None, None)
