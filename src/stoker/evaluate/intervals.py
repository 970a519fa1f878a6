"""Means with standard errors and intervals, and paired bootstrap intervals of differences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 10_000
FEWEST = 10  # rows from which on an interval says something; resamples of fewer are unreliable
AT_ONCE = 1 << 22  # random numbers drawn at a time


@dataclass(frozen=True)
class Mean:
    """Mean of values with its standard error, ``s / sqrt(n)``; None for fewer than two values.

    Attributes:
        ties: number of values that are 0.5, if all others are 0 or 1; else 0.
    """

    value: float
    standard_error: float | None
    count: int
    ties: int = 0


@dataclass(frozen=True)
class PairedDifference:
    """Difference of the first minus the second on the same rows.

    Attributes:
        low, high: the paired bootstrap interval.
        wins, losses, ties: rows on which the first is higher, lower, equal.
    """

    value: float
    low: float
    high: float
    wins: int
    losses: int
    ties: int

    @property
    def rows(self) -> int:
        return self.wins + self.losses + self.ties

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval excludes equality; never with so few rows that resamples say nothing."""
        return self.rows >= FEWEST and (self.low > 0 or self.high < 0)


def mean_of(values: Sequence[float]) -> Mean | None:
    """Returns the mean of values; None without any."""
    if not values:
        return None
    spread = float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else None
    ties = list(values).count(0.5) if set(values) <= {0.0, 0.5, 1.0} else 0
    return Mean(float(np.mean(values)), spread, len(values), ties)


def mean_interval(mean: Mean) -> tuple[float | None, float | None]:
    """Returns the interval of a mean: Wilson's (1927) for a share of rows, `wins_interval` with ties, else the normal
    one; None without an error.

    Values from 0 to 1 have the standard error of a share only if each is 0 or 1.
    """
    value, error, rows = mean.value, mean.standard_error, mean.count
    if error is None:
        return None, None
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    if mean.ties:
        wins = round(value * rows - mean.ties / 2)
        low, high = wins_interval(wins, rows - mean.ties - wins, rows, CONFIDENCE)
        return (1 + low) / 2, (1 + high) / 2
    spread = value * (1 - value)
    if spread < 0 or rows < 2 or not math.isclose(error, math.sqrt(spread / (rows - 1)), rel_tol=1e-6, abs_tol=1e-9):
        return value - z * error, value + z * error
    centre = (value + z**2 / (2 * rows)) / (1 + z**2 / rows)
    half = z * math.sqrt(spread / rows + (z / (2 * rows)) ** 2) / (1 + z**2 / rows)
    return max(0.0, centre - half), min(1.0, centre + half)


def wins_interval(wins: int, losses: int, rows: int, confidence: float) -> tuple[float, float]:
    """Returns the interval of (wins - losses) / rows, which has a length also where all rows are ties or all are wins.

    It is the adjusted Wald interval of Bonett and Price (2012, "Adjusted Wald confidence interval for a difference of
    binomial proportions based on paired data"): a win, a loss and two rows are added.
    """
    won, lost = (wins + 1) / (rows + 2), (losses + 1) / (rows + 2)
    half = NormalDist().inv_cdf((1 + confidence) / 2) * math.sqrt((won + lost - (won - lost) ** 2) / (rows + 2))
    return max(-1.0, won - lost - half), min(1.0, won - lost + half)


def paired_difference(
    first: Sequence[float],
    second: Sequence[float],
    *,
    seed: int,
    confidence: float = CONFIDENCE,
    units: Sequence[float] | None = None,
) -> PairedDifference:
    """Returns the difference of two means over the same rows, with an interval from resampling the rows.

    If scores of 0, 0.5 and 1 differ by the same number in every row, resamples do not differ: see `wins_interval`.

    Args:
        first, second: a value for each row.
        units: number of units, such as tokens, that each row's values are summed over; then the means are
            ``sum(values) / sum(units)``.
    """
    a, b = np.asarray(first, dtype=float), np.asarray(second, dtype=float)
    u = np.ones_like(a) if units is None else np.asarray(units, dtype=float)
    assert len(a) == len(b) == len(u) > 0
    rows = len(a)
    generator = np.random.default_rng(seed)
    drawn = np.empty(RESAMPLES)
    step = max(1, AT_ONCE // rows)
    for begin in range(0, RESAMPLES, step):
        chosen = generator.integers(0, rows, (min(step, RESAMPLES - begin), rows))
        totals = u[chosen].sum(1)
        drawn[begin : begin + len(chosen)] = a[chosen].sum(1) / totals - b[chosen].sum(1) / totals
    tail = expanded_tail((1 - confidence) / 2, rows)
    low, high = np.quantile(drawn, [tail, 1 - tail])
    value = float(a.sum() / u.sum() - b.sum() / u.sum())
    wins, losses = int((a > b).sum()), int((a < b).sum())
    if units is None and low == high and set(np.unique((a, b))) <= {0.0, 0.5, 1.0} and abs(value) in (0.0, 1.0):
        low, high = wins_interval(wins, losses, rows, confidence)
    return PairedDifference(value, float(low), float(high), wins, losses, rows - wins - losses)


def expanded_tail(tail: float, rows: int) -> float:
    """Returns the share of resamples that a percentile interval excludes on each side.

    A percentile interval of few rows is too short, as its spread divides by n and its quantiles are the normal ones;
    this one is as long as Student's (Hesterberg, 2015, "What teachers should know about the bootstrap", section 4.4).
    """
    if rows < 3:
        return 0.0
    quantile = student_quantile(1 - tail, rows - 1)
    return NormalDist().cdf(-math.sqrt(rows / (rows - 1)) * quantile)


def student_quantile(probability: float, degrees: int) -> float:
    """Returns a quantile of Student's distribution, from the normal one (Abramowitz and Stegun, 1964, 26.7.5)."""
    z = NormalDist().inv_cdf(probability)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / degrees**power for power, term in enumerate(terms))
