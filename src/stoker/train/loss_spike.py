"""Loss spikes: losses far above those of the steps before, by a robust z-score."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

TO_SIGMA = 1.4826  # a normal distribution's standard deviation is so many median absolute deviations
LEAST_SPREAD = 0.01  # of the median: losses that hardly differ make no spike of a small step
LEAST = 8  # losses to compare with, before anything is called a spike


def robust_z(value: float, before: Sequence[float]) -> float:
    """How far a value lies above the median of others, in standard deviations estimated from their median absolute
    deviation (Iglewicz and Hoaglin, "How to Detect and Handle Outliers", 1993).

    The deviation counts as no less than `LEAST_SPREAD` of the median.
    """
    middle = median(before)
    spread = TO_SIGMA * median(abs(other - middle) for other in before)
    return (value - middle) / max(spread, LEAST_SPREAD * abs(middle), 1e-12)


def is_spike(loss: float, before: Sequence[float], threshold: float) -> bool:
    """Whether a loss is a spike beside those of the steps before.

    Args:
        threshold: z-score from which it is one; 0 for never.
    """
    return threshold > 0 and len(before) >= LEAST and robust_z(loss, before) > threshold
