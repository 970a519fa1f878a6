"""Values that JSON has a text for."""

from __future__ import annotations

from typing import Any


def finite(value: Any) -> Any:
    """The same with null for numbers that are not finite, which JSON cannot write and browsers do not read."""
    if isinstance(value, dict):
        return {str(key): finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not abs(value) < float("inf") else value
