"""What a run's folder says of what was predicted and what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stoker.runs.plan_record import MeasuredRun, Predicted, PredictionRecord, measured_of, read_comparison
from stoker.runs.run_folder import RunFolder
from stoker.units import GIB


def predicted(**changes: Any) -> Predicted:
    values: dict[str, Any] = {
        "layout": "data 1", "micro_batch": 4, "accumulation": 2, "longest": 512, "mean": 512.0, "model": "m",
        "precision": "fp32", "tuning": "full", "device": "a processor", "threads": 2, "machines": 1, "per_machine": 1,
        "calibration": "2026-11-21", "corrected_by": None, "memory": {"weights": 40 * GIB, "activations": 1.2 * GIB},
        "time": {"compute": 2.0, "optimizer": 0.31}, "peak": 41.2 * GIB, "upper": 45.3 * GIB, "seconds": 2.31,
    }  # fmt: skip
    return Predicted(**{**values, **changes})


def metrics(*seconds: float) -> list[dict[str, float]]:
    return [{"step": i, "seconds": s, "memory_gib": 1.0 + i / 8} for i, s in enumerate(seconds, start=1)]


def test_the_line() -> None:
    both = PredictionRecord(predicted(), measured=MeasuredRun(10, 2.4, 39.8 * GIB))
    measured = "predicted  41.20 GiB, 2.31 s a step; measured 39.80 GiB (-3 %), 2.4 s"
    assert both.line() == f"{measured} (+4 %); calibrated on 2026-11-21"
    assert (
        PredictionRecord(predicted()).line()
        == "predicted  41.20 GiB (45.30 at most), 2.31 s a step; calibrated on 2026-11-21"
    )
    # The catalogue's rates of any processor say nothing about this one, so no error of them is given.
    catalogue = PredictionRecord(predicted(calibration=None), measured=MeasuredRun(10, 13.0, 39.8 * GIB)).line()
    assert "13 s; this machine was not calibrated: `stoker plan --calibrate`" in catalogue and "+4" not in catalogue
    learnt = PredictionRecord(predicted(calibration=None, corrected_by="runs/a"), measured=both.measured).line()
    assert learnt == f"{measured} (+4 %); corrected by the run runs/a"
    policy = PredictionRecord(predicted(rollouts=8.0), measured=MeasuredRun(10, 2.4, 39.8 * GIB, 6.0)).line()
    assert policy == f"{measured} (+4 %); rollouts 8 s a step, measured 6 s (-25 %); calibrated on 2026-11-21"
    assert "2.31 s a step and 8 s of rollouts" in PredictionRecord(predicted(rollouts=8.0)).line()
    assert PredictionRecord(None, "a module").line() == "predicted  unavailable: a module"


def test_what_is_written_is_read(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert read_comparison(folder) is None  # a run of an earlier Stoker
    for comparison in (
        PredictionRecord(predicted(), measured=MeasuredRun(10, 2.4, 39.8 * GIB)),
        PredictionRecord(predicted()),
        PredictionRecord(None, "a module"),
    ):
        comparison.write(folder)
        assert read_comparison(folder) == comparison
        assert json.loads(folder.plan.read_text())["line"] == comparison.line()
    folder.plan.write_text("{")
    assert read_comparison(folder) is None


@pytest.mark.parametrize(
    ("seconds", "steps", "median"),
    [((9.0, 5.0, 1.0, 2.0, 9.0), 3, 2.0), ((9.0, 5.0, 1.0), 1, 1.0), ((9.0, 5.0), 1, 5.0), ((9.0,), 1, 9.0)],
)
def test_the_first_two_steps_do_not_count_where_there_are_more(
    seconds: tuple[float, ...], steps: int, median: float
) -> None:
    found = measured_of(metrics(*seconds))
    assert found == MeasuredRun(steps, median, (1.0 + len(seconds) / 8) * GIB)


def test_memory_is_that_of_the_fullest_process() -> None:
    assert measured_of(metrics(1.0), memory=7.0) == MeasuredRun(1, 1.0, 7.0)
    assert measured_of([]) is None


def test_rollouts_are_a_mean_over_steps_with_and_without_new_answers() -> None:
    for taken, expected in (
        ([9, 0, 6, 0, 5, 0, 4], 2.75),  # without the first round, and the last one, which has not ended
        ([9, 0, 6], 4.5),
        ([9, 0, 0], 3.0),
    ):
        lines = [{**line, "rollout_seconds": s} for line, s in zip(metrics(*[2.0] * len(taken)), taken, strict=True)]
        found = measured_of(lines)
        assert found is not None and found.rollouts == expected
    without = measured_of(metrics(2.0, 2.0))
    assert without is not None and without.rollouts == 0
