"""Rows of a table of runs, as files of JSON lines have them, and whether their numbers can be meant."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stoker.errors import Problem, UserError

Row = Mapping[str, Any]

# The largest number that can be meant of each whole one: beyond any machine or model.
MOST = {
    "num_gpus": 10_000_000, "dp": 10_000_000, "tp": 4096, "pp": 4096, "vp": 512, "cp": 4096, "ep": 65536,
    "micro_batch": 10_000_000, "global_batch": 10**9, "seq_len": 10**8, "layers": 10_000, "hidden": 10**6,
    "heads": 10**5, "kv_heads": 10**5, "ffn": 10**7, "vocab": 10**8, "zero_stage": 3,
}  # fmt: skip
PHRASES = ("zero_stage",)  # may be a phrase
SIZES = ("params", "active_params")  # may be rounded


def read_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """(line number, row) of a file of JSON lines.

    Raises:
        UserError: there is no such file, or a line is not a JSON object.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(Problem(f"cannot be read: {error}", file=str(path))) from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            place = {"file": str(path), "line": number, "column": error.colno}
            raise UserError(Problem(f"is not JSON: {error.msg}", **place)) from None  # type: ignore[arg-type]
        if not isinstance(row, dict):
            raise UserError(Problem("is not a JSON object", file=str(path), line=number))
        yield number, row


def checked(row: Row) -> Row:
    """The row with its numbers as numbers.

    Raises:
        UserError: one of them is none, or cannot be meant.
    """
    found = dict(row)
    for key, most in MOST.items():
        if row.get(key) is not None and not (key in PHRASES and _number(row[key]) is None):
            found[key] = _whole(key, row[key], least=0 if key == "zero_stage" else 1, most=most)
    for key in SIZES:
        if row.get(key) is not None:
            size = _number(row[key])
            if size is None or not 0 < size < 1e16:
                raise UserError(Problem(f"`{key}` is {row[key]!r}", "a number of parameters is meant, above 0"))
            found[key] = size
    return found


def _whole(key: str, value: Any, *, least: int, most: int) -> int:
    number = _number(value)
    if number is None or number != int(number) or not least <= number <= most:
        raise UserError(Problem(f"`{key}` is {value!r}", f"a whole number from {least} to {most:,} is meant"))
    return int(number)


def _number(value: Any) -> float | None:
    """None where it is none, or not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if abs(number) < float("inf") else None
