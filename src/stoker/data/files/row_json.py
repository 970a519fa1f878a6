"""Parses rows of JSON; a repeated key, of which `json.loads` keeps the last value, is an error."""

from __future__ import annotations

import json
import sys
from typing import Any

_SHOWN = 40  # characters of a key in a reason


class RepeatedKeyError(ValueError):
    """An object has a key twice; the message names the key."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise RepeatedKeyError(f"repeated key: {repeated[:_SHOWN]}")
    return found


def _object_or_error(pairs: list[tuple[str, Any]]) -> dict[str, Any] | RepeatedKeyError:
    try:
        return _object(pairs)
    except RepeatedKeyError as error:
        return error


ROWS = json.JSONDecoder(object_pairs_hook=_object)
MARKED = json.JSONDecoder(object_pairs_hook=_object_or_error)  # has the error in place of an object


def repeated_key_in(value: Any) -> RepeatedKeyError | None:
    """Returns the first error in a value of `MARKED`; None if there is none."""
    if isinstance(value, RepeatedKeyError):
        return value
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((error for each in inner if (error := repeated_key_in(each)) is not None), None)


def unparsed_reason(error: RecursionError | ValueError) -> str:
    """Returns why well-formed JSON was not parsed: a repeated key, or the parser's own limits."""
    if isinstance(error, RepeatedKeyError):
        return str(error)
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return f"not valid JSON: an integer of more than {sys.get_int_max_str_digits():,} digits"
