"""Joins rows that each hold one scored answer to one row for each prompt, wherever its answers are in a source."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from stoker.data.files.readers import decode
from stoker.data.files.rows import Raw, Rejected
from stoker.data.formats.messages import Refused, has_content
from stoker.data.formats.named_columns import column_of
from stoker.data.formats.pair_formats import PAIRS, finite_number

SCORED = "scored"
ALIASES = PAIRS[SCORED].aliases
BESIDE = ("system", "tools")  # columns that belong to the prompt


@dataclass
class _Group:
    """The answers to one prompt; the first row has the columns beside them."""

    first: Raw
    columns: dict[str, Any]
    answers: list[Any] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)


def group_by_prompt(rows: Iterable[Raw | Rejected], columns: Mapping[str, str]) -> Iterator[Raw | Rejected]:
    """Yields a row with ``answers`` and ``scores`` for each prompt, in the order of their first rows.

    Rows without a prompt, an answer or a finite score are rejected one by one. All rows are in memory until the last
    has been read.

    Args:
        columns: the job's `{our name: the file's name}`.
    """
    groups: dict[str, _Group] = {}
    for raw in rows:
        value = decode(raw) if isinstance(raw, Raw) else raw
        if isinstance(value, Rejected):
            yield value
            continue
        assert isinstance(raw, Raw)
        if isinstance(value, str):
            yield Rejected(raw.source, raw.row, "not an object: a document")
            continue
        try:
            names, answer, score = _answer_of(value, columns)
        except Refused as refused:
            yield Rejected(raw.source, raw.row, str(refused))
            continue
        beside = [value.get(column_of(value, ALIASES, columns, name)) for name in BESIDE]
        key = json.dumps([raw.source, value[names["prompt"]], *beside], sort_keys=True, default=str)
        rest = {name: content for name, content in value.items() if name not in (names["answer"], names["score"])}
        group = groups.setdefault(key, _Group(raw, rest))
        group.answers.append(answer)
        group.scores.append(score)
        group.rows.append(raw.row)
    for group in groups.values():
        joined = {**group.columns, "answers": group.answers, "scores": group.scores}
        yield Raw(group.first.source, group.first.row, joined, tuple(group.rows[1:]))


def _answer_of(value: dict[str, Any], columns: Mapping[str, str]) -> tuple[dict[str, str], Any, float]:
    """Returns the file's names of the columns, the answer and its score.

    Raises:
        Refused: the row has no prompt, no answer or no finite score.
    """
    names = {ours: column_of(value, ALIASES, columns, ours) for ours in ("prompt", "answer", "score")}
    for name in names.values():
        if name not in value:
            raise Refused(f"missing column: {name}")
    for ours in ("prompt", "answer"):
        if not has_content(value[names[ours]]):
            raise Refused(f"empty {ours}")
    return names, value[names["answer"]], finite_number(value[names["score"]], names["score"])


def skip_rows(rows: Iterable[Raw | Rejected], read: int) -> Iterator[Raw | Rejected]:
    """Yields the rows after the first ``read`` rows of the source, joined ones counted each."""
    for row in rows:
        if read <= 0:
            yield row
        read -= 1 + (len(row.others) if isinstance(row, Raw) else 0)
