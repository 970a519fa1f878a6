"""Failures of a run: the chance of an interruption, the best checkpoint interval, and the effective training time.

Devices fail independently and at a constant rate, and one failure stops the run; times between interruptions are
then exponential with mean M = 1 / (N rate). Sources: Young, 1974, and Daly, 2006, on the best interval between
checkpoints. Measured: large jobs follow 1 / N, jobs of few devices do not (Kokolis et al., 2024).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, expm1, inf, sqrt

HOUR, DAY = 3600.0, 86400.0  # seconds


def mean_between(failures_per_device_hour: float, devices: int) -> float:
    """Returns the mean seconds between interruptions of a run on this number of devices: M; infinite without failures.

    1.97e-5 failures per device and hour were measured for 16,384 H100 (Llama 3: 419 in 54 days).
    """
    return HOUR / (devices * failures_per_device_hour) if failures_per_device_hour else inf


def young_interval(stall: float, mean_between: float) -> float:
    """Seconds of work between checkpoints that lose least, to first order: sqrt(2 stall M)."""
    return sqrt(2 * stall * mean_between)


def daly_interval(stall: float, mean_between: float) -> float:
    """Returns Daly's (2006) higher-order interval; ``mean_between`` if a checkpoint costs more than it saves."""
    if stall >= 2 * mean_between:
        return mean_between
    ratio = stall / (2 * mean_between)
    return young_interval(stall, mean_between) * (1 + sqrt(ratio) / 3 + ratio / 9) - stall


@dataclass(frozen=True)
class InterruptionCost:
    """Seconds that checkpoints and interruptions cost a run.

    Attributes:
        stall: pause of training at each checkpoint.
        recovery: from an interruption to the first step after it: detection, start, loading.
        step: of one optimizer step; checkpoints are taken between steps.
        write: after the pause until a checkpoint is complete, while training goes on; the next one waits for it.
    """

    stall: float
    recovery: float
    step: float = 1.0
    write: float = 0.0

    def best_interval(self, mean_between: float) -> float:
        """Returns the seconds of work between checkpoints: Daly's, no shorter than a step or a write."""
        return max(daly_interval(self.stall, mean_between), self.step, self.write)

    def pause(self, interval: float) -> float:
        """Returns the pause of training at each checkpoint, with the wait for the write of the one before."""
        return self.stall + max(0.0, self.write - interval)


@dataclass(frozen=True)
class Forecast:
    """Breakdown of the time of a run with interruptions.

    Attributes:
        mean_between: seconds between interruptions.
        interruptions: expected number of them until the run is done.
        chance: of at least one.
        interval: seconds of work between checkpoints.
        recovery: seconds of recovery per interruption, interrupted recoveries included.
        recomputation: seconds of lost work per interruption, which are repeated.
        stalls: total seconds of pauses for checkpoints.
        effective: fraction of all time that is training and not repeated.
        seconds: total, until the run is done.
    """

    mean_between: float
    interruptions: float
    chance: float
    interval: float
    recovery: float
    recomputation: float
    stalls: float
    effective: float
    seconds: float


def forecast(mean: float, *, work: float, saving: InterruptionCost, interval: float | None = None) -> Forecast:
    """Returns the forecast of a run that takes ``work`` seconds without interruptions and checkpoints.

    effective = 1 - (interruptions x (recovery + recomputation) + stalls) / seconds

    where a checkpoint's work and pause together take s. An interruption goes back to the newest complete checkpoint, so
    that it loses s / 2 + w of work to first order; w is the time of the write beside training, no longer than the
    interval. Exactly, exp(-(w + n s) / M) of the times until an interruption reach the end of the n-th write; their sum
    is exp(-w / M) / (exp(s / M) - 1), and the rest of M is lost. Interruptions may fall into a recovery, so that each
    takes M (1 - exp(-recovery / M)) of it, and exp(-recovery / M) of them lose work. Together seconds =
    M exp((recovery + w) / M) (exp(s / M) - 1) work / interval, with w = 0 the complete model of Daly, 2006.

    Args:
        mean: seconds between interruptions, as of `mean_between`.
        interval: seconds of work between checkpoints; by default the best.
    """
    interval = min(work, saving.best_interval(mean) if interval is None else interval)
    pause = saving.pause(interval)
    stalls = pause * work / interval
    if mean == inf:
        recovery, lost, seconds = saving.recovery, 0.0, work + stalls
        effective = work / seconds
    else:
        segment = interval + pause
        working = exp(-saving.recovery / mean)  # fraction of interruptions outside of a recovery
        recovery = mean * (1 - working)
        ratio = segment / mean
        late = min(saving.write, interval) / mean
        reached = segment * exp(-ratio - late) / -expm1(-ratio)  # without overflow
        lost = working * (mean - reached)
        effective = max(0.0, 1 - (recovery + lost) / mean) * interval / segment
        seconds = work / effective if effective else inf
    return Forecast(
        mean_between=mean,
        interruptions=seconds / mean,
        chance=-expm1(-seconds / mean),
        interval=interval,
        recovery=recovery,
        recomputation=lost,
        stalls=stalls,
        effective=effective,
        seconds=seconds,
    )
