"""Formats numbers for people: counts with a noun, sizes in bytes, and times ago."""

from __future__ import annotations

AGO = ((86_400, "d"), (3_600, "h"), (60, "min"))


def pluralise(number: int, noun: str) -> str:
    """Formats a number with its noun in the singular or the plural."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def size_text(size: int | float) -> str:
    """Formats 1500000000 as ``1.5 GB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} TB"


def ago(seconds: float) -> str:
    """Formats 7200 as ``2 h ago``."""
    for unit, name in AGO:
        if seconds >= unit:
            return f"{seconds / unit:.0f} {name} ago"
    return f"{seconds:.0f} s ago"
