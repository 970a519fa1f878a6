"""Hooks are called at their points of every step, and what they return is what training goes on with."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
from running import write_job
from test_module import JOB
from torch import Tensor

from stoker.job.load_job import load_job
from stoker.resilience.heartbeat import Heart, Listener
from stoker.runs.run_folder import RunFolder
from stoker.runs.step_metrics import StepMetrics
from stoker.train.hooks import Hook
from stoker.train.prepare import prepare
from stoker.train.run import train_run


def test_the_points_of_a_step(base: Path) -> None:
    seen: list[Any] = []

    def doubled(step: int, loss: Tensor) -> Tensor:
        seen.append(("after", step))
        return 2 * loss

    def plain(metrics: StepMetrics) -> None:
        seen.append(("metrics", metrics.step))

    prepared = prepare(load_job(write_job(base, {**JOB, "epochs": None, "steps": 2})), base)
    folder = RunFolder(base / "run")
    hooks = [
        Hook(before_passes=lambda step: seen.append(("before", step)), after_passes=doubled),
        Hook(after_step=plain),
    ]
    with folder.take():
        train_run(prepared, folder, base, quiet=True, hooks=hooks)
    assert seen == [(point, step) for step in (1, 2) for point in ("before", "after", "metrics")]
    other = prepare(load_job(write_job(base, {**JOB, "epochs": None, "steps": 1, "output": "other"})), base)
    with RunFolder(base / "other").take():
        train_run(other, RunFolder(base / "other"), base, quiet=True)
    losses = [RunFolder(base / name).read_metrics()[0]["loss"] for name in ("run", "other")]
    assert losses[0] == pytest.approx(2 * losses[1], rel=1e-12)


def test_a_hook_gets_the_rate_and_whether_the_step_was_taken(base: Path) -> None:
    seen: list[tuple[float, bool]] = []

    def spoilt(step: int, loss: Tensor) -> Tensor:
        return loss * (math.nan if step == 2 else 1.0)

    job = {**JOB, "epochs": None, "steps": 3, "faults": {"not_finite": "skip"}}
    prepared, folder = prepare(load_job(write_job(base, job)), base), RunFolder(base / "run")
    hook = Hook(after_passes=spoilt, after_optimizer=lambda lr, taken: seen.append((lr, taken)))
    with folder.take():
        train_run(prepared, folder, base, quiet=True, hooks=[hook])
    assert [taken for _, taken in seen] == [True, False, True]
    assert [lr for lr, _ in seen] == [line["lr"] for line in folder.read_metrics()]


def test_the_time_of_a_hook_counts_as_the_process_own(base: Path, tmp_path: Path) -> None:
    """So that a process that is slow on purpose is found to be slow."""
    prepared = prepare(load_job(write_job(base, {**JOB, "epochs": None, "steps": 3})), base)
    folder = RunFolder(base / "run")
    with folder.take():
        heart = Heart(tmp_path, 0)
        train_run(
            prepared, folder, base, quiet=True, heart=heart, hooks=[Hook(before_passes=lambda _: time.sleep(0.1))]
        )
    pulse = Listener(tmp_path).pulse(0)
    assert pulse is not None and pulse.own >= 0.3
