"""Which format a file's columns are, and for columns of none, the nearest."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from stoker.data.messages import parsed
from stoker.errors import Problem, UserError

# Needed columns of each format, in the order in which a row that fits several is taken.
NEEDED: dict[str, tuple[str, ...]] = {
    "preference": ("chosen", "rejected"),
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "instruction": ("instruction", "output"),
    "prompt": ("prompt", "completion"),
    "text": ("text",),
    "judged": ("messages", "label"),
}
CONVERSATIONS = ("messages", "sharegpt", "instruction", "prompt")
ALIASES: dict[tuple[str, str], tuple[str, ...]] = {
    ("messages", "messages"): ("conversations", "conversation"),
    ("sharegpt", "conversations"): ("conversation", "messages"),
    ("instruction", "instruction"): ("question", "query", "prompt"),
    ("instruction", "input"): ("context",),
    ("instruction", "output"): ("response", "answer"),
    ("text", "text"): ("content", "document"),
    ("preference", "chosen"): ("chosen_messages",),
    ("preference", "rejected"): ("rejected_messages",),
    ("preference", "prompt"): ("instruction", "question", "query"),
    ("preference", "conversations"): ("messages", "conversation"),
}
_VERDICTS = {"true": True, "1": True, "false": False, "0": False}
COMPARED = 1000  # columns that a name is looked for among


def detect(rows: Sequence[dict[str, Any] | str], columns: Mapping[str, str] | None = None) -> str:
    """The format that most of `rows` have the columns of.

    Args:
        columns: the job's `{our name: the file's name}`.

    Raises:
        UserError: no row fits any format; names the columns found and the nearest format.
    """
    votes = Counter(found for row in rows if (found := format_of(row, columns or {})))
    if votes:
        return votes.most_common(1)[0][0]
    names = list(dict.fromkeys(name for row in rows if isinstance(row, dict) for name in row))
    if not names:
        raise UserError(Problem("no row to tell the format from", "give at least one whole row"))
    found = ", ".join(map(repr, names[:12])) + (", ..." if len(names) > 12 else "")
    nearest, wanted = _nearest(names[:COMPARED], [row for row in rows if isinstance(row, dict)])
    shown = ", ".join(f"{ours}: {theirs}" for ours, theirs in wanted.items())
    known = "; ".join(f"{name} ({', '.join(needed)})" for name, needed in NEEDED.items())
    raise UserError(
        Problem(
            f"the columns {found} fit no known format; known are {known}",
            f"the nearest is {nearest}: name your columns, `columns: {{{shown}}}`",
        )
    )


def verdict_of(label: Any) -> bool | None:
    """What a label says of an answer; None where it is no verdict."""
    if not isinstance(label, bool | int | float | str):
        return None
    return _VERDICTS.get(str(int(label) if label in (0, 1) else label).strip().lower())


def column_of(row: Mapping[str, Any], format: str, columns: Mapping[str, str], ours: str) -> str:
    """The file's name of our column; our own where the row has neither it nor an alias."""
    if ours in columns:
        return columns[ours]
    if ours in row:
        return ours
    return next((name for name in ALIASES.get((format, ours), ()) if name in row), ours)


def format_of(row: dict[str, Any] | str, columns: Mapping[str, str], *, judged: bool = True) -> str | None:
    """The first format whose needed columns are all there, under our names before aliases.

    Args:
        judged: whether a conversation with a verdict beside it is a format of its own.
    """
    if isinstance(row, str):
        return "text"
    names = {*row, *(ours for ours, theirs in columns.items() if theirs in row)}
    formats = {name: needed for name, needed in NEEDED.items() if name != "judged"}
    by_name = [name for name, needed in formats.items() if names.issuperset(needed)]
    by_alias = [
        name
        for name, needed in formats.items()
        if all({ours, *ALIASES.get((name, ours), ())} & names for ours in needed)
    ]
    found = next(iter(by_name + by_alias), None)
    if judged and found in CONVERSATIONS and verdict_of(row.get(columns.get("label", "label"))) is not None:
        return "judged"
    if found not in ("messages", "sharegpt"):
        return found
    turns = parsed(row.get(column_of(row, found, columns, NEEDED[found][0])))
    first = turns[0] if isinstance(turns, list) and turns else None
    if isinstance(first, dict) and "role" in first:
        return "messages"
    return "sharegpt" if isinstance(first, dict) and "from" in first else found


def _nearest(names: Sequence[str], rows: Sequence[dict[str, Any]]) -> tuple[str, dict[str, str]]:
    """The format most like a file, and which of its columns may be ours: by their names, else by what they hold."""
    likely = max(NEEDED, key=lambda format: _likeness(NEEDED[format], names))
    by_name = {ours: _closest(ours, names) for ours in NEEDED[likely]}
    if all(by_name.values()):
        return likely, {ours: theirs or "" for ours, theirs in by_name.items()}
    for name in names:
        for row in rows:
            turns = parsed(row.get(name))
            first = turns[0] if isinstance(turns, list) and turns else None
            if isinstance(first, dict):
                found = "sharegpt" if "from" in first else "messages"
                return found, {NEEDED[found][0]: name}
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
