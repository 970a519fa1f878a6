"""Finds a click log's time column by its values, for logs in which no name says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

from stoker.data.ranking.column_kinds import MOSTLY, is_id_name
from stoker.data.ranking.ids import is_missing
from stoker.data.ranking.numbers import number_of
from stoker.data.ranking.times import DAY, date_in_digits, seconds_per_unit, time_of

EARLIEST, LATEST = 631_152_000.0, 4_102_444_800.0  # 1990 and 2100, in seconds since 1970
LEAST = 3  # different times


def likely_time(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Returns the column whose values are most likely the times of the rows; None if no column's are.

    Candidates hold dates in ISO 8601, dates in digits, or numbers that are times since 1970 in one unit. Columns in
    whose order the rows are come first. Days without a time of day may be birthdays or releases, so that they are
    taken only in order.
    """
    found = {name: times for name in names if not is_id_name(name) and (times := _times([r.get(name) for r in rows]))}
    in_order = [name for name, times in found.items() if _is_ordered(times)]
    others = [name for name, times in found.items() if any(time % DAY for time in times)]
    return next(iter(in_order + others), None)


def _times(values: Sequence[Any]) -> list[float]:
    """Returns values as seconds since 1970; empty unless most of those that are there are times."""
    there = [value for value in values if not is_missing(value)]
    in_digits = all(date_in_digits(number_of(value)) is not None for value in there)
    times: list[float] = []
    for value in there:
        with suppress(ValueError):
            times.append(time_of(value, in_digits=in_digits))
    unit = seconds_per_unit(times)
    if unit is None:
        return []
    times = [time * unit for time in times if EARLIEST <= time * unit < LATEST]
    return times if len(times) >= MOSTLY * len(there) and len(set(times)) >= LEAST else []


def _is_ordered(times: Sequence[float]) -> bool:
    """Returns whether nearly every time is at least the one before it, or at most."""
    pairs = list(pairwise(times))
    return max(sum(a <= b for a, b in pairs), sum(a >= b for a, b in pairs)) >= MOSTLY * len(pairs)
