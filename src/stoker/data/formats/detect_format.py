"""Detects the format of a file from its columns, and names the nearest format where none fits."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from stoker.data.formats.all_formats import FORMATS, RowUse, format_of
from stoker.data.formats.messages import parsed
from stoker.data.formats.pair_formats import PAIRS
from stoker.errors import Problem, UnknownColumns, UserError

COMPARED = 1000  # columns that a name is looked for among


def detect(
    rows: Sequence[dict[str, Any] | str],
    columns: Mapping[str, str] | None = None,
    use: RowUse = "answers",
) -> str:
    """Returns the format whose columns most of `rows` have.

    Args:
        columns: the job's `{our name: the file's name}`.
        use: what the rows are for.

    Raises:
        UserError: no row fits any format; names the columns found and the nearest format.
    """
    fits = (format_of(row, columns or {}, use) for row in rows)
    if votes := Counter(found for found in fits if found):
        return votes.most_common(1)[0][0]
    names = list(dict.fromkeys(name for row in rows if isinstance(row, dict) for name in row))
    if not names:
        raise UserError(Problem("no row to tell the format from", "give at least one whole row"))
    found = ", ".join(map(repr, names[:12])) + (", ..." if len(names) > 12 else "")
    if use == "pairs":
        wanted = {ours: _closest(ours, names[:COMPARED]) or "" for ours in FORMATS["preference"].needed}
        nearest = "preference"
    else:
        nearest, wanted = _nearest(names[:COMPARED], [row for row in rows if isinstance(row, dict)])
    shown = ", ".join(f"{ours}: {theirs or '...'}" for ours, theirs in wanted.items())
    among = PAIRS if use == "pairs" else FORMATS
    known = "; ".join(f"{name} ({', '.join(format.needed)})" for name, format in among.items())
    raise UserError(
        Problem(
            f"the columns {found} fit no known format; known are {known}",
            f"the nearest is {nearest}: name your columns, `columns: {{{shown}}}`",
            columns=UnknownColumns(tuple(names[:COMPARED]), tuple(wanted.items())),
        )
    )


def _nearest(names: Sequence[str], rows: Sequence[dict[str, Any]]) -> tuple[str, dict[str, str]]:
    """Returns the format most similar to a file, and the columns to map, by their names, else by their content."""
    likely = max(FORMATS, key=lambda name: _likeness(FORMATS[name].needed, names))
    by_name = {ours: _closest(ours, names) for ours in FORMATS[likely].needed}
    if all(by_name.values()):
        return likely, {ours: theirs or "" for ours, theirs in by_name.items()}
    for name in names:
        for row in rows:
            turns = parsed(row.get(name))
            first = turns[0] if isinstance(turns, list) and turns else None
            if isinstance(first, dict):
                found = "sharegpt" if "from" in first else "messages"
                return found, {FORMATS[found].needed[0]: name}
    length = {name: sum(len(str(row.get(name))) for row in rows if isinstance(row.get(name), str)) for name in names}
    *before, answer = sorted((name for name in names if length[name]), key=length.__getitem__) or [names[0]]
    if not before:
        return "text", {"text": answer}
    first, second = sorted((before[-1], answer), key=names.index)  # the two columns with the most text
    return "instruction", {"instruction": first, "output": second}


def _closest(ours: str, names: Sequence[str]) -> str | None:
    return next(iter(difflib.get_close_matches(ours, names, n=1, cutoff=0.6)), None)


def _likeness(needed: Sequence[str], names: Sequence[str]) -> float:
    best = [max(difflib.SequenceMatcher(None, ours, name).ratio() for name in names) for ours in needed]
    return sum(best) / len(best)
