"""Numbers of cells, the same for the texts of CSV and the values of JSON."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from stoker.data.ranking.ids import is_missing

LARGEST = float(np.finfo(np.float32).max)  # numbers and weights are stored as float32
_TRUTH = {"true": 1.0, "false": 0.0}
_MISSING = frozenset({"", "nan", "na", "n/a", "null", "none"})  # after a sign: "-" alone is missing too


def number_of(value: Any) -> float:
    """Returns the number of a value, NaN if it has none; true and false are 1 and 0.

    ``1_0`` is not a number, although Python reads it as one.
    """
    if isinstance(value, str) and "_" in value:
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):  # OverflowError: integers of more than 1,024 bits
        return _TRUTH.get(value.strip().lower(), math.nan) if isinstance(value, str) else math.nan


def is_truth(value: Any) -> bool:
    """Returns whether a value is true or false, as JSON or a text has them."""
    return isinstance(value, bool) or (isinstance(value, str) and value.strip().lower() in _TRUTH)


def is_missing_number(value: Any) -> bool:
    """Returns whether a cell among numbers has no value: a missing one, or a text such as NA, null and -."""
    return is_missing(value) or (isinstance(value, str) and value.strip().lower().lstrip("+-") in _MISSING)
