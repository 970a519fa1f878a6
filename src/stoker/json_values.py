"""Converts values to ones that JSON can represent."""

from __future__ import annotations

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


def as_text(value: Any) -> str:
    """Converts a value to text that UTF-8 can encode: bytes, half a surrogate pair, a date or a decimal number."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    return str(value).encode("utf-8", "backslashreplace").decode("utf-8")
