"""Columns and format of the first rows of a data file, what its columns are taken as, and unreadable rows."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

from stoker.data.files.byte_streams import Check
from stoker.data.files.readers import LOGS, data_suffix, decode, read_rows
from stoker.data.files.rows import Raw, Rejected
from stoker.data.formats.all_formats import taken_columns
from stoker.data.formats.detect_format import detect
from stoker.data.ranking.find_features import time_and_group
from stoker.data.ranking.likely_time import likely_time
from stoker.data.ranking.ranking_block import RankingBlock
from stoker.errors import UserError
from stoker.page.data_files.uploads import WHOLE
from stoker.page.page_error import page_problem, problem_json

ROWS = 100
MOST_COLUMNS = 50  # named in an answer


def first_rows(path: Path, check: Check) -> dict[str, Any]:
    """Returns {columns, format, taken, likely_time, rows, unreadable, problem} of the first rows of a file.

    The format is empty if the columns fit none, as those of a click log; `taken` are the columns that it reads, by
    our names. `likely_time` is the column whose values are most likely times, if no column is found by its name. The
    problem is None unless a file has no row that can be read.

    Args:
        check: see `read_rows`.
    """
    if data_suffix(path) in LOGS:
        return _answer([], data_suffix(path).lstrip("."), 0, 0)
    try:
        rows = decoded_rows(path, check)
    except UserError as error:
        return _answer([], "", 0, 0) | {"problem": problem_json(error.problems[0])}
    values = [row for row in rows if not isinstance(row, Rejected)]
    columns = list(dict.fromkeys(name for row in values if isinstance(row, dict) for name in row))
    found = _answer(columns[:MOST_COLUMNS], "", len(rows), len(rows) - len(values))
    if not values:
        reason = next((row.reason for row in rows if isinstance(row, Rejected)), "")
        problem = (
            page_problem("no row can be read: {reason}", reason=reason) if reason else page_problem("the file is empty")
        )
        return found | {"problem": problem_json(problem)}
    if time_and_group(columns, RankingBlock())[0] is None:
        dicts = [row for row in values if isinstance(row, dict)]
        found |= {"likely_time": likely_time(columns[:MOST_COLUMNS], dicts) or ""}
    try:
        format = detect(values, use="texts")
    except UserError:
        return found
    return found | {"format": format, "taken": taken_columns(values, format)}


def decoded_rows(path: Path, check: Check) -> list[dict[str, Any] | str | Rejected]:
    """Returns the first rows of a file, or why they cannot be read; `check` as of `read_rows`.

    Raises:
        UserError: the file cannot be read.
    """
    first = islice(read_rows(path, most=WHOLE, check=check), ROWS)
    return [decode(row) if isinstance(row, Raw) else row for row in first]


def _answer(columns: list[str], format: str, rows: int, unreadable: int) -> dict[str, Any]:
    counts = {"rows": rows, "unreadable": unreadable}
    return {"columns": columns, "format": format, "taken": {}, "likely_time": "", "problem": None, **counts}
