"""The learning rate against its closed forms."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from running import run

from stoker.errors import UserError
from stoker.job.load_job import load_job
from stoker.runs.run_folder import RunFolder
from stoker.train.optim.lr_schedule import Schedule, warmup_steps
from stoker.train.prepare import _check_warmup
from stoker.train.run_schedule import length_of, schedule_of, warmup_problem

PEAK, STEPS, WARMUP = 2e-3, 100, 10


@pytest.mark.parametrize("shape", ["linear", "cosine", "wsd", "constant"])
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_closed_forms(shape: str, floor: float) -> None:
    schedule = Schedule(PEAK, STEPS, WARMUP, shape, floor)
    for step in range(1, WARMUP + 1):
        assert schedule.lr(step) == pytest.approx(PEAK * step / WARMUP)
    for step in range(WARMUP + 1, STEPS + 1):
        t = (step - WARMUP - 1) / (STEPS - WARMUP)
        whole = {
            "linear": 1 - t,
            "cosine": (1 + math.cos(math.pi * t)) / 2,
            "wsd": 1.0 if t <= 0.8 else 5 * (1 - t),
            "constant": 1.0,
        }[shape]
        assert schedule.lr(step) == pytest.approx(PEAK * (floor + (1 - floor) * whole))


@pytest.mark.parametrize("shape", ["linear", "cosine", "wsd"])
def test_the_peak_comes_once_and_the_end_is_near_the_floor(shape: str) -> None:
    schedule = Schedule(PEAK, STEPS, WARMUP, shape, 0.1)
    rates = [schedule.lr(step) for step in range(1, STEPS + 1)]
    assert max(rates) == pytest.approx(PEAK) and rates[WARMUP - 1] == pytest.approx(PEAK)
    assert all(a >= b for a, b in zip(rates[WARMUP:], rates[WARMUP + 1 :], strict=False))
    assert rates[-1] == pytest.approx(0.1 * PEAK, rel=0.6) and rates[-1] >= 0.1 * PEAK


def test_a_stage_in_front_warms_up_and_stays_at_the_peak() -> None:
    schedule, plain = Schedule(PEAK, 10, 4, "linear", first=6), Schedule(PEAK, 10, 4, "linear")
    assert [schedule.lr(step) / PEAK for step in range(1, 7)] == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])
    assert [schedule.lr(6 + step) for step in range(1, 11)] == [plain.lr(step) for step in range(1, 11)]


def test_the_schedule_of_a_run_begins_after_its_stage_of_new_rows() -> None:
    train = SimpleNamespace(lr=PEAK, warmup=0.1, schedule="linear", min_lr=0.2)
    job: Any = SimpleNamespace(tune=SimpleNamespace(new_rows_first=20), train=train)
    assert schedule_of(job, 120) == Schedule(PEAK, 100, 10, "linear", 0.2, first=20)


def test_no_step_is_wasted_on_a_rate_of_zero() -> None:
    for shape in ("linear", "cosine", "wsd", "constant"):
        assert all(Schedule(PEAK, 7, 0, shape).lr(step) > 0 for step in range(1, 8))
    assert Schedule(PEAK, 1, 0, "cosine").lr(1) == PEAK


@pytest.mark.parametrize(("warmup", "steps", "expected"), [(5, 100, 5), (0, 100, 0), (0.03, 100, 3), (0.0, 9, 0)])
def test_a_warmup_is_in_steps_or_a_fraction(warmup: float, steps: int, expected: int) -> None:
    assert warmup_steps(warmup, steps) == expected


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("epochs: 1\ntrain: {batch: 4, warmup: 100}", "within the run's 40 steps"),
        ("epochs: 1\ntrain: {batch: 4, warmup: 40}", "within the run's 40 steps"),
        ("epochs: 1\ntrain: {batch: 4, warmup: 39}", None),
        ("steps: 150\ntrain: {warmup: 60}\ntune: {new_rows_first: 100}", "within the run's 50 steps after"),
        ("steps: 150\ntrain: {warmup: 49}\ntune: {new_rows_first: 100}", None),
        ("steps: 1\ntrain: {warmup: 0.9}", None),
    ],
)
def test_a_warm_up_must_end(lines: str, said: str | None, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(f"task: sft\nmodel: m\ndata: x\n{lines}\n")
    job = load_job(tmp_path / "job.yaml").job
    task: Any = SimpleNamespace(epoch_samples=lambda epochs: 160)
    problem = warmup_problem(job, length_of(job, task).steps)
    assert (said in problem.message) if said and problem else (said is problem is None)


def test_a_warm_up_longer_than_the_epochs_is_refused_at_its_key(sft: dict[str, Any], base: Path) -> None:
    job = {**sft, "epochs": 1, "train": {**sft["train"], "warmup": 100}}
    del job["steps"]
    with pytest.raises(
        UserError, match=r"job.yaml:\d+:\d+: `train.warmup` of 100 steps never ends within the run's 10"
    ):
        run(base, job)


def test_a_log_that_grows_and_a_run_that_has_begun_may_have_a_longer_warm_up(tmp_path: Path) -> None:
    def check(lines: str) -> None:
        (tmp_path / "job.yaml").write_text(f"data: x\nepochs: 1\noutput: run\ntrain: {{warmup: 1000}}\n{lines}\n")
        loaded = load_job(tmp_path / "job.yaml")
        task = SimpleNamespace(epoch_samples=lambda epochs: 160)
        prepared: Any = SimpleNamespace(job=loaded.job, task=task, corpus=None)
        _check_warmup(loaded, prepared, tmp_path)

    check("task: ranking\nranking: {progressive: true, label: y}")
    with pytest.raises(UserError, match="never ends"):
        check("task: sft\nmodel: m")
    (tmp_path / "run").mkdir()
    RunFolder(tmp_path / "run").event("started")
    check("task: sft\nmodel: m")
