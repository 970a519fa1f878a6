"""Texts of a fixed form, such as names of Kubernetes: the pattern, and the form in words for messages."""

from __future__ import annotations

from typing import Any

from pydantic import Field

FORMS: dict[str, str] = {}  # the form in words, by pattern


def of_form(pattern: str, words: str, *, most: int | None = None) -> Any:
    """Returns the field of a text that matches a pattern.

    Args:
        words: the form in words, such as "an absolute path".
        most: maximum number of characters.
    """
    FORMS[pattern] = words
    return Field(pattern=pattern, max_length=most)


def form_of(error: Any) -> str:
    """Returns the form that a text must have according to an error of pydantic; empty for another error."""
    context = error.get("ctx", {})
    if error["type"] == "string_too_long":
        return f"text of at most {context['max_length']} characters"
    return FORMS.get(context.get("pattern", ""), "") if error["type"] == "string_pattern_mismatch" else ""
