"""The questions that the tiny runs of these tests are trained on."""

from __future__ import annotations

import json
from pathlib import Path

QUESTIONS = [
    ("How are you?", "I am well, thank you."),
    ("What is blue?", "The sea is blue."),
    ("Who is cold?", "The wind."),
]


def write_lines(path: Path, rows: list[dict[str, object]]) -> Path:
    """Writes JSON Lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
