"""Integer ids that a program stored as floats, which loses their last digits from 2^53 on."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stoker.data.ranking.features import Column
from stoker.errors import Problem

LARGEST_EXACT = 2**53  # the largest float64 below which each integer is one
SOME = 0.01  # share of such values from which on a column is refused
_EXPONENT = re.compile(r"-?\d(\.\d+)?e\+\d+")  # as Python writes floats; hexadecimal digits have no plus


def float_id_problems(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> Iterator[Problem]:
    """Yields the features whose ids are such floats: pandas makes them of a column of integers with missing values.

    Different ids may have become one, and none is the integer that a request will have.
    """
    for column in columns:
        if column.kind != "id":
            continue
        values = [value for row in rows if (value := row.get(column.name)) is not None]
        large = [value for value in values if _is_large_float(value)]
        if large and len(large) >= SOME * len(values):
            message = f"the ids of {column.name} are floats such as {str(large[0])[:40]}, whose last digits are lost"
            hint = "write integers or texts, as pandas does from `Int64`; or state `kind: dense` for quantities"
            yield Problem(message, hint, key="data[0].path")


def _is_large_float(value: Any) -> bool:
    if isinstance(value, str) and _EXPONENT.fullmatch(value.strip()):
        value = float(value)
    return isinstance(value, float) and LARGEST_EXACT < abs(value) < math.inf
