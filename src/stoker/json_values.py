"""Converts values to ones that JSON can represent, and reads JSON that may have any form."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import isfinite
from numbers import Integral, Real
from typing import Any, NoReturn


def refuse_constant(name: str) -> NoReturn:
    """Raises ValueError for NaN and infinity, as the ``parse_constant`` of `json.loads`."""
    raise ValueError(f"{name} is not JSON")


def finite(value: Any) -> Any:
    """Converts non-finite numbers to null, and types without a JSON form, such as dates, to text."""
    if isinstance(value, dict):
        return {str(key): finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    if isinstance(value, bool | int | None):
        return value
    if isinstance(value, Integral):  # of NumPy
        return int(value)
    if isinstance(value, Real):
        return float(value) if isfinite(value) else None
    return as_text(value)


def map_leaves(value: Any, function: Callable[[Any], Any]) -> Any:
    """Returns a value of JSON with a function of each value that is neither an object nor a list."""
    if isinstance(value, dict):
        return {key: map_leaves(inner, function) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [map_leaves(inner, function) for inner in value]
    return function(value)


def as_text(value: Any) -> str:
    """Converts a value to text that UTF-8 can encode: bytes, half a surrogate pair, a date or a decimal number."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    return str(value).encode("utf-8", "backslashreplace").decode("utf-8")


def json_or_none(text: str | bytes) -> Any:
    """Parses JSON; returns None if it is not valid, or nested too deeply."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def whole_number(value: Any) -> int:
    """Returns the integer part of a finite number; 0 for other values."""
    found = finite_number(value)
    return int(found) if found is not None else 0


def finite_number(value: Any) -> float | None:
    """Returns a finite number; None for any other value that a file may have in its place."""
    try:
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    except OverflowError:  # an integer above the range of a float
        return None
    return float(value) if is_number else None


def kind_of_json(value: Any) -> str:
    """Names the kind of a JSON value, for messages."""
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)
