"""Converts lines of ``metrics.jsonl`` to columns of numbers."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from itertools import chain
from types import NoneType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic_core import from_json

from stoker.json_values import json_or_none

MOST_COLUMNS = 256
Numbers = NDArray[np.float64]


class MetricColumns:
    """A column for each key that has a number in some line; NaN where a line has none.

    Attributes:
        count: lines so far.
        last: the newest of them.
    """

    def __init__(self) -> None:
        self.count = 0
        self.last: dict[str, Any] = {}
        self._columns: dict[str, array[float]] = {}

    def add_lines(self, lines: Sequence[bytes]) -> None:
        """Appends lines; lines that are not JSON objects are left out."""
        rows = _objects(lines)
        if not rows:
            return
        found = {key: _numbers([row.get(key) for row in rows]) for key in dict.fromkeys(chain.from_iterable(rows))}
        self.add(len(rows), {key: column for key, column in found.items() if column is not None}, rows[-1])

    def add(self, count: int, columns: Mapping[str, Numbers], last: dict[str, Any]) -> None:
        """Appends columns of ``count`` lines, with the complete last line."""
        for key, values in columns.items():
            column = self._columns.get(key)
            if column is None:
                if len(self._columns) >= MOST_COLUMNS:
                    continue
                column = self._columns[key] = array("d")
            column.frombytes(np.full(self.count - len(column), np.nan).tobytes())
            column.frombytes(values.tobytes())
        self.count += count
        self.last = last

    def names(self) -> list[str]:
        """Returns the names of all columns."""
        return list(self._columns)

    def column(self, key: str, begin: int = 0) -> Numbers:
        """Returns a copy of a column from a line on, (count - begin,)."""
        found = np.full(self.count - begin, np.nan)
        kept = self._columns.get(key)
        if kept is not None and len(kept) > begin:
            found[: len(kept) - begin] = np.frombuffer(kept, dtype=np.float64)[begin:]
        return found


def _objects(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """Parses the objects of some lines: all at once, in a third of the time, or one by one if one is invalid."""
    whole = [line for line in lines if line]
    try:
        found = from_json(b"[%b]" % b",".join(whole), cache_strings="keys")
    except ValueError:
        found = []
    if len(found) != len(whole):
        found = list(map(json_or_none, whole))
    return [values for values in found if isinstance(values, dict)]


def _numbers(values: Sequence[Any]) -> Numbers | None:
    """Converts values to numbers; None if none of them is one. Booleans are not numbers."""
    kinds = set(map(type, values))
    if not kinds & {int, float}:
        return None
    if not kinds <= {int, float, NoneType}:
        values = [value if type(value) in (int, float) else None for value in values]
    try:
        return np.array(values, dtype=np.float64)
    except OverflowError:  # an integer beyond the range of float64
        return np.array([_finite(value) for value in values], dtype=np.float64)


def _finite(value: float | None) -> float | None:
    try:
        return None if value is None else float(value)
    except OverflowError:
        return None
