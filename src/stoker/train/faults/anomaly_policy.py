"""The response to a step with a loss or gradient that is not finite, or a loss spike, by the job's `faults:`."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any, Literal

from stoker.job.blocks.faults_block import FaultsBlock
from stoker.train.step import StepResult

SHOWN_ROWS = 16  # row numbers named when a batch is bad; all of them are in the event
MOST_IN_A_ROW = 8  # consecutive skipped steps: after that the weights are to blame, not the samples
MOST_AT_ONE_PLACE = 3  # rollbacks within one window of steps
TO_SIGMA = 1.4826  # standard deviation over median absolute deviation of a normal distribution
LEAST_SPREAD = 0.01  # of the median: where losses hardly differ, a small change is not a spike
LEAST = 8  # losses before the step; with fewer, nothing counts as a spike

Answer = Literal["fine", "overflow", "stop", "skip", "again", "back"]


class AnomalyPolicy:
    """Classifies the steps of a run. All processes see the same numbers, so all give the same answers."""

    def __init__(self, faults: FaultsBlock) -> None:
        self._faults = faults
        self._left_out = 0  # consecutive steps
        self._back: list[tuple[int, int]] = []  # recent rollbacks: (from step, to step)

    def answer(self, result: StepResult, before: Sequence[float], *, is_retry: bool = False) -> Answer:
        """Returns the response to a step.

        - ``fine``: none.
        - ``overflow``: the step is skipped, and a smaller loss scale is all that it needs.
        - ``skip``: the step is skipped.
        - ``again``: the step is tried once more, as no weight has changed and a hardware fault may be transient.
        - ``back``: the run returns to an earlier state.
        - ``stop``: the run ends.

        Args:
            before: losses of the steps that it is compared with.
            is_retry: whether the step has been tried twice already.
        """
        policy = self._faults.not_finite
        if not result.wrong:
            self._left_out = 0
            if not result.taken:
                return "overflow"
            return "back" if is_spike(result.loss, before, self._faults.spike) else "fine"
        if policy == "roll-back":
            return "back" if is_retry else "again"
        if policy == "skip":
            self._left_out += 1
        return "skip" if 0 < self._left_out <= MOST_IN_A_ROW else "stop"

    def remembered(self, before: Sequence[float], result: StepResult) -> list[float]:
        """Returns the losses that the step after a taken one is compared with; empty if spikes are not looked for."""
        return [*before, result.loss][-self._faults.window :] if self._faults.spike else []

    def goes_back_before(self, step: int) -> int | None:
        """Returns the step before which the restored state must lie; None after too many rollbacks at this place.

        Each further rollback at one place goes back further, as the state before a spike may already contain its cause.
        """
        self._back = [(start, to) for start, to in self._back if abs(step - start) <= self._faults.window]
        if len(self._back) == MOST_AT_ONE_PLACE:
            return None
        return min((to for _, to in self._back), default=step)

    def went_back(self, step: int, to: int) -> None:
        """Records a rollback."""
        self._back.append((step, to))

    def why(self, result: StepResult, before: Sequence[float]) -> str:
        """Describes the anomaly, for messages."""
        if not result.taken:
            return result.what_is_wrong
        z = robust_z(result.loss, before)
        return f"the loss is {result.loss:.4g}, {z:.3g} deviations above the median of the last {len(before)} steps"

    def failure(self, result: StepResult, before: Sequence[float], rows: Sequence[str]) -> str:
        """Describes why the run ends with this step, for messages."""
        text = f"step {result.step}: {self.why(result, before)}; the batch was {first_rows(rows)}"
        if self._left_out > MOST_IN_A_ROW:
            text += f"; the {MOST_IN_A_ROW} steps before it were left out for the same reason"
        if len(self._back) == MOST_AT_ONE_PLACE:
            window = self._faults.window
            text += f"; training has gone back {MOST_AT_ONE_PLACE} times within {window} steps, which did not help"
        return text


def first_rows(rows: Sequence[str]) -> str:
    """Formats the first rows for a message."""
    more = f" and {len(rows) - SHOWN_ROWS} more" if len(rows) > SHOWN_ROWS else ""
    return ", ".join(rows[:SHOWN_ROWS]) + more


def in_event(result: StepResult) -> dict[str, Any]:
    """Returns the numbers of a step that an event records."""
    return {
        "step": result.step,
        "loss": str(result.loss),
        "grad_norm": str(result.grad_norm),
        "seconds": round(result.seconds, 3),
    }


def robust_z(value: float, before: Sequence[float]) -> float:
    """Distance of a value above the median of others, in standard deviations estimated from their median absolute
    deviation (Iglewicz and Hoaglin, "How to Detect and Handle Outliers", 1993).

    The deviation is at least `LEAST_SPREAD` of the median.
    """
    middle = median(before)
    spread = TO_SIGMA * median(abs(other - middle) for other in before)
    return (value - middle) / max(spread, LEAST_SPREAD * abs(middle), 1e-12)


def is_spike(loss: float, before: Sequence[float], threshold: float) -> bool:
    """Returns whether a loss is a spike compared with those of the steps before.

    Args:
        threshold: z-score above which it is one; 0 disables the check.
    """
    return threshold > 0 and len(before) >= LEAST and robust_z(loss, before) > threshold
