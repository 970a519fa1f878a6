"""Corrections of later predictions, from a finished run's prediction and measurement."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path

from stoker.errors import Problem, UserError, user_file_errors
from stoker.files import read_file
from stoker.hardware.measured.planner_correction import Correction, fitted
from stoker.runs.plan_record import MeasuredRun, Predicted, measured_of, read_comparison
from stoker.runs.run_folder import RunFolder


@dataclass(frozen=True)
class Lesson:
    """A run's prediction and measurement, and the correction under which they agree."""

    predicted: Predicted
    measured: MeasuredRun
    correction: Correction

    @property
    def seconds(self) -> float:
        """Seconds of a step, as it would be predicted now."""
        return sum(self.correction.time_parts(self.predicted.time).values())

    @property
    def memory(self) -> float:
        """Bytes, as they would be predicted now."""
        return sum(self.correction.memory_parts(self.predicted.memory).values())


def lesson_of(path: Path) -> Lesson:
    """Returns the correction that follows from a run; does not store it (see
    `stoker.hardware.measured.planner_correction.keep`).

    Raises:
        UserError: there is no run, or it has no record of its machine, no prediction or no steps.
    """
    folder = RunFolder(path)
    if not folder.metrics.is_file():
        raise UserError(Problem("this is not the folder of a run", "give one that `stoker runs` lists", file=str(path)))
    with user_file_errors(str(folder.environment)):
        dict(json.loads(read_file(folder.environment)))
    comparison = read_comparison(folder)
    if comparison is None:
        message = "the run keeps no prediction: it is of an earlier Stoker"
        raise UserError(Problem(message, "train some steps of the job again", file=str(path)))
    found = comparison.predicted
    if found is None:
        raise UserError(Problem(f"nothing was predicted of the run: {comparison.why_not}", file=str(path)))
    measured = comparison.measured or measured_of(folder.read_metrics())
    if measured is None:
        raise UserError(Problem("the run has no steps", "let it train some", file=str(path)))
    kind = Correction(
        device=found.device,
        threads=found.threads,
        precision=found.precision,
        tuning=found.tuning,
        calibration=found.calibration,
        run=str(path.resolve()),
        model=found.model,
        date=date.today().isoformat(),
        stoker=version("stoker"),
    )
    correction = fitted(
        kind,
        memory_parts=found.memory,
        time_parts=found.time,
        memory=measured.memory,
        seconds=measured.seconds,
    )
    return Lesson(found, measured, correction)
