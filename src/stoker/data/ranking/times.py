"""Parses the times of rows: numbers of any unit, dates in ISO 8601, or dates in digits such as 20240131."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from stoker.data.ranking.numbers import number_of

DAY = 86_400.0  # seconds
# Seconds, milli-, micro- and nanoseconds since 1970 are distinguished by size; the ranges are years 1973 to 5138.
_UNITS = ((1e8, 1e11, 1.0), (1e11, 1e14, 1e-3), (1e14, 1e17, 1e-6), (1e17, 1e20, 1e-9))
_DIGITS = {8: "%Y%m%d", 10: "%Y%m%d%H", 12: "%Y%m%d%H%M", 14: "%Y%m%d%H%M%S"}  # formats by number of digits
_YEARS = (1970, 2100)  # of dates in digits, so that 1700000000 counts seconds
_FIRST_DATE = datetime.min.replace(tzinfo=UTC).timestamp()


def time_of(value: Any, *, in_digits: bool = False) -> float:
    """Converts a value of the time column to a number that grows with time.

    A number is returned unchanged. A date or a date with a time becomes seconds since 1970; without a zone it is in
    UTC.

    Args:
        in_digits: whether numbers are dates, see `date_in_digits`.

    Raises:
        ValueError: it is neither.
    """
    number = number_of(value)
    if in_digits and math.isfinite(number):
        date = date_in_digits(number)
        if date is None:
            raise ValueError(f"not a time: {str(value)[:40]!r} (the first rows have dates in digits)")
        return date
    if math.isnan(number) and isinstance(value, str):
        number = _date(value)
    elif math.isnan(number) and not isinstance(value, (int, float)):
        raise ValueError(f"not a time: a value of type {type(value).__name__}")
    if not math.isfinite(number):
        raise ValueError("not a time: a number that is not finite in float64")
    return number


def date_in_digits(number: float) -> float | None:
    """Returns the seconds from 1970 to a date such as 20240131, 2024013123, 202401312359 or 20240131235959, in UTC;
    None for other numbers.
    """
    text = f"{number:.0f}"
    if not number.is_integer() or len(text) not in _DIGITS or not _YEARS[0] <= int(text[:4]) < _YEARS[1]:
        return None
    try:
        return datetime.strptime(text, _DIGITS[len(text)]).replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None


def _date(text: str) -> float:
    try:
        found = datetime.fromisoformat(text.strip())
    except ValueError:
        raise ValueError(f"not a time: {text[:40]!r}") from None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def seconds_per_unit(times: Sequence[float] | np.ndarray) -> float | None:
    """Returns the unit, in seconds, of times since 1970; None if the numbers are not such times (1, 2, 3)."""
    if not len(times):
        return None
    middle = float(np.median(times))
    return next((factor for low, high, factor in _UNITS if low <= middle < high), None)


def is_in_unit(time: float, factor: float) -> bool:
    """Returns whether a time is one since 1970 in a unit of ``factor`` seconds, and not rather in a smaller one."""
    lowest, latest, _ = _UNITS[0]
    is_date = _FIRST_DATE <= time * factor < latest
    return is_date and not lowest <= abs(time) < lowest / factor


def days_of(times: np.ndarray, factor: float) -> np.ndarray:
    """Returns each time's day since 1970, int64, from times in a unit of ``factor`` seconds."""
    return np.floor(times * factor / DAY).astype(np.int64)
