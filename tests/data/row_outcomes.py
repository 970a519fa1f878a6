"""Rows of files as the workers see them, and rows as JSON lines."""

from __future__ import annotations

import json
from pathlib import Path

from stoker.data.files.readers import decode, read_rows
from stoker.data.files.rows import Rejected


def outcome(path: Path, start: int = 0) -> list[tuple[int, object]]:
    """(row, its value or the reason of its refusal) as the workers would see them."""
    result: list[tuple[int, object]] = []
    for row in read_rows(path, start):
        value = row if isinstance(row, Rejected) else decode(row)
        assert row.source == str(path)
        result.append((row.row, value.reason if isinstance(value, Rejected) else value))
    return result


def json_lines(rows: list[dict[str, str]]) -> bytes:
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)
