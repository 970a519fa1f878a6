"""Checks before training: those of the disk keep no run from going on that has begun."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from stoker.errors import CannotRun
from stoker.job.layout import Layout
from stoker.launch import health_checks
from stoker.launch.health_checks import check_disk, state_bytes
from stoker.runs.run_folder import RunFolder


def test_a_full_disk_stops_a_new_run_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder(tmp_path)
    free, rate = check_disk(run.checkpoints, 1000, run)
    assert free is not None and free > 1000 and rate
    with pytest.raises(CannotRun, match="has room for"):
        check_disk(run.checkpoints, 1 << 60, run)

    with monkeypatch.context() as small:
        small.setattr(health_checks, "measure_disk", lambda _: (300 << 10, 1e8))
        says = r"room for 0\.3 MiB, and a checkpoint takes 1\.5 MiB and leaves 1\.0 MiB free"
        with pytest.raises(CannotRun, match=says):
            check_disk(run.checkpoints, 3 << 19, run)
        small.setattr(health_checks, "measure_disk", lambda _: (2 << 20, 1e8))  # it would not be written
        with pytest.raises(CannotRun, match=r"room for 2\.0 MiB, and a checkpoint takes 1\.5 MiB"):
            check_disk(run.checkpoints, 3 << 19, run)
        assert check_disk(run.checkpoints, 1 << 20, run)[0] == 2 << 20

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


@pytest.mark.parametrize(
    ("optimizer", "average", "layout", "tensors"),
    [
        ("adamw", None, Layout(), 3),
        ("sgd", None, Layout(), 2),
        ("adamw", {"decay": 0.9}, Layout(), 4),
        ("adamw", None, Layout(data=4), 0.75),  # every process has all; here only one of them is counted
        ("adamw", None, Layout(data=4, shard="zero3", shard_size=4), 3),
        ("adamw", None, Layout(data=4, shard="zero2", shard_size=4), 0.75),
        ("adamw", None, Layout(data=2, tensor=2), 1.5),
    ],
)
def test_the_bytes_of_a_checkpoint(optimizer: str, average: object, layout: Layout, tensors: float) -> None:
    model = nn.Linear(10, 6)
    model.bias.requires_grad_(False)
    train = SimpleNamespace(optimizer=optimizer, average=average)
    prepared: Any = SimpleNamespace(task=SimpleNamespace(model=model), job=SimpleNamespace(train=train))
    assert state_bytes(prepared, layout) == 4 * 60 * tensors
