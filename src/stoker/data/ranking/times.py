"""Parses the times of rows: numbers of any unit, or dates in ISO 8601."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

import numpy as np

DAY = 86_400.0  # seconds
# Seconds, milli-, micro- and nanoseconds since 1970 are distinguished by size; the ranges are years 1973 to 5138.
_UNITS = ((1e8, 1e11, 1.0), (1e11, 1e14, 1e-3), (1e14, 1e17, 1e-6), (1e17, 1e20, 1e-9))


def time_of(value: Any) -> float:
    """Converts a value of the time column to a number that grows with time.

    A number is returned unchanged. A date or a date with a time becomes seconds since 1970; without a zone it is in
    UTC.

    Raises:
        ValueError: it is neither.
    """
    try:
        number = float(value)
    except TypeError:
        raise ValueError(f"not a time: a value of type {type(value).__name__}") from None
    except OverflowError:  # an integer of more than 1,024 bits
        number = math.inf
    except ValueError:
        number = _date(str(value))
    if not math.isfinite(number):
        raise ValueError("not a time: a number that is not finite in float64")
    return number


def _date(text: str) -> float:
    try:
        found = datetime.fromisoformat(text.strip())
    except ValueError:
        raise ValueError(f"not a time: {text[:40]!r}") from None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def seconds_per_unit(times: np.ndarray) -> float | None:
    """Returns the unit, in seconds, of times since 1970; None if the numbers are not such times (1, 2, 3)."""
    if not len(times):
        return None
    middle = float(np.median(times))
    return next((factor for low, high, factor in _UNITS if low <= middle < high), None)


def days_of(times: np.ndarray) -> np.ndarray | None:
    """Returns each time's day since 1970, int64; None if the times do not count from 1970."""
    factor = seconds_per_unit(times)
    return None if factor is None else np.floor(times * factor / DAY).astype(np.int64)
