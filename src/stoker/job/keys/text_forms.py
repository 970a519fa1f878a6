"""Patterns of text values, such as names in Kubernetes, with the descriptions that error messages use."""

from __future__ import annotations

from typing import Any

from pydantic import Field

FORMS: dict[str, str] = {}  # description by pattern


def of_form(pattern: str, words: str, *, most: int | None = None) -> Any:
    """Returns a pydantic field for a string that must match a pattern.

    Args:
        words: description of matching strings, such as "an absolute path".
        most: maximum number of characters.
    """
    FORMS[pattern] = words
    return Field(pattern=pattern, max_length=most)


def form_of(error: Any) -> str:
    """Returns the description of the strings that a pydantic error required; empty for errors of other types."""
    context = error.get("ctx", {})
    if error["type"] == "string_too_long":
        return f"text of at most {context['max_length']} characters"
    return FORMS.get(context.get("pattern", ""), "") if error["type"] == "string_pattern_mismatch" else ""
