"""The planner's prediction for a run and the measurement: the run's ``plan.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from stoker.files import read_file
from stoker.runs.run_folder import RunFolder
from stoker.units import GIB

FORMAT = 1
NOT_CALIBRATED = "this machine was not calibrated: `stoker plan --calibrate` measures its rates"
UNSETTLED = 2  # first steps of a start, in which memory is allocated and kernels are selected


@dataclass(frozen=True)
class Predicted:
    """The prediction as the run began. Sizes are bytes of the fullest device, times seconds of a step.

    Attributes:
        layout, micro_batch, accumulation: the layout as text, rows, and micro-batches of a step.
        longest, mean: computed positions of a row, in the fullest micro-batch (for memory) and on average (for time).
        model: its name in the job.
        precision, tuning: as `stoker.plan.setting.TrainingWork` names them.
        device: the catalogue's name of a GPU, the maker's of a processor.
        threads: of a process, on a processor; 0 on a GPU.
        machines, per_machine: how many, and processes on each.
        calibration: date of the measurements of the device; None if the catalogue's figures were used.
        corrected_by: the run that predictions of its kind were corrected by; None without.
        memory, time: by component, without that correction.
        peak, upper: bytes: the point estimate, and its upper bound.
        seconds: of a step's training.
        rollouts: seconds of a step's share of the answers that it trains on; 0 for tasks without.
    """

    layout: str
    micro_batch: int
    accumulation: int
    longest: int
    mean: float
    model: str
    precision: str
    tuning: str
    device: str
    threads: int
    machines: int
    per_machine: int
    calibration: str | None
    corrected_by: str | None
    memory: Mapping[str, float]
    time: Mapping[str, float]
    peak: float
    upper: float
    seconds: float
    rollouts: float = 0.0

    def describe(self) -> str:
        """Returns ``41.20 GiB (45.32 at most), 2.31 s a step``."""
        sampling = f" and {self.rollouts:.3g} s of rollouts" if self.rollouts else ""
        return f"{self.peak / GIB:.2f} GiB ({self.upper / GIB:.2f} at most), {self.seconds:.3g} s a step{sampling}"

    def source(self) -> str:
        """Describes the source of the rates behind the predicted time."""
        if self.corrected_by is not None:
            return f"corrected by the run {self.corrected_by}"
        return NOT_CALIBRATED if self.calibration is None else f"calibrated on {self.calibration}"


@dataclass(frozen=True)
class MeasuredRun:
    """The measurement of a run.

    Attributes:
        steps: number of steps in the median; evaluation and checkpoints are not in it.
        seconds: of a step.
        memory: bytes, largest of the fullest process.
        rollouts: seconds of a step's share of the answers that it trained on, a mean over the steps.
    """

    steps: int
    seconds: float
    memory: float
    rollouts: float = 0.0


@dataclass(frozen=True)
class PredictionRecord:
    """A prediction, or the reason for its absence, and the measurement once the run has one."""

    predicted: Predicted | None
    why_not: str = ""
    measured: MeasuredRun | None = None

    def line(self) -> str:
        """Returns ``predicted  41.20 GiB, 2.31 s a step; measured 39.80 GiB (-3 %), 2.40 s (+4 %); calibrated ...``.

        Without a calibration the predicted time is the catalogue's for any such device, so no error of it is given.
        """
        found, real = self.predicted, self.measured
        if found is None:
            return f"predicted  unavailable: {self.why_not}"
        if real is None:
            return f"predicted  {found.describe()}; {found.source()}"
        memory = f"{real.memory / GIB:.2f} GiB ({real.memory / found.peak - 1:+.0%})"
        known = found.calibration is not None or found.corrected_by is not None
        seconds = _compared(real.seconds, found.seconds if known else None)
        text = f"predicted  {found.peak / GIB:.2f} GiB, {found.seconds:.3g} s a step; measured {memory}, {seconds}"
        if found.rollouts:
            measured = _compared(real.rollouts, found.rollouts if known else None)
            text += f"; rollouts {found.rollouts:.3g} s a step, measured {measured}"
        return f"{text.replace('%', ' %')}; {found.source()}"

    def write(self, folder: RunFolder) -> None:
        """Writes it into the run's folder."""
        folder.write_json(folder.plan, {"format": FORMAT, **asdict(self), "line": self.line()})


def _compared(measured: float, predicted: float | None) -> str:
    return f"{measured:.3g} s" + ("" if predicted is None else f" ({measured / predicted - 1:+.0%})")


def read_comparison(folder: RunFolder) -> PredictionRecord | None:
    """Returns the record of a run's folder; None if it is missing, or of another format."""
    try:
        data: dict[str, Any] = json.loads(read_file(folder.plan))
        if data["format"] != FORMAT:
            return None
        predicted = Predicted(**data["predicted"]) if data["predicted"] else None
        return PredictionRecord(
            predicted, data["why_not"], MeasuredRun(**data["measured"]) if data["measured"] else None
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def measured_of(metrics: Sequence[Mapping[str, Any]], *, memory: float | None = None) -> MeasuredRun | None:
    """Returns the median step of a start's lines of ``metrics.jsonl``, without the first two if there are more.

    Args:
        memory: bytes of the fullest process; by default of the one that wrote the metrics.
    """
    settled = metrics[UNSETTLED:] or metrics[-1:]
    if not settled:
        return None
    peak = memory if memory is not None else max(line["memory_gib"] for line in metrics) * GIB
    return MeasuredRun(len(settled), median(line["seconds"] for line in settled), peak, _rollouts_of(metrics))


def _rollouts_of(metrics: Sequence[Mapping[str, Any]]) -> float:
    """Returns a step's share of the rounds of answers, over whole rounds; without the first one if there are more."""
    taken = [line.get("rollout_seconds", 0.0) for line in metrics]
    begins = [place for place, seconds in enumerate(taken) if seconds]
    if len(begins) < 2:
        return fmean(taken)
    first = begins[1] if len(begins) > 2 else begins[0]
    return fmean(taken[first : begins[-1]])
