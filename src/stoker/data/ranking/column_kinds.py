"""The kind of a column, from the values of its first rows, by rules that the audit shows."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from stoker.data.ranking.features import STATED, Column, Kind
from stoker.data.ranking.line_formats import CRITEO_TEXTS
from stoker.data.ranking.numbers import LARGEST, is_missing_number, is_truth, number_of
from stoker.data.ranking.ranking_block import FeatureBlock

SAMPLE = 10_000  # rows that the features are found from
BUCKETS = 16
LONGEST = 50  # ids of a sequence
MOSTLY = 0.95  # share of numbers among the values of a number's column; the others are bad cells, or missing as NA is
SOME = 0.01  # share of lists among the values of a column of ids, and of weighted ones among its lists
SEPARATOR = "|"
LARGEST_COUNT = 2**31  # integers from here on are taken for ids
_ID_NAME = re.compile(r"(^|_)(ids?|uuid|uid|code|zip|zipcode|zip_code|sku|hash|key)$", re.I)
_CAMEL_ID = re.compile(r"[a-z]I[dD]s?$")
_SEQUENCE_NAME = re.compile(r"(^|_)(hist|history|seq|sequence|recent|past)(_|$)", re.I)


def column_of(name: str, values: Sequence[Any], stated: FeatureBlock, is_criteo: bool) -> Column:
    """Returns the feature of a column.

    Args:
        values: those of the first rows that are not missing.
        stated: the job's settings of it.
        is_criteo: whether the log has the form of Criteo's.
    """
    found = _found(name, values, is_criteo=is_criteo)
    kind, why = (stated.kind, STATED) if stated.kind != "auto" else (found.kind, found.why)
    if stated.kind == "auto" and stated.separator and found.kind not in ("ids", "sequence"):
        kind, why = "ids", "a separator is stated"
    if stated.kind == "auto" and (stated.buckets or stated.boundaries):
        kind, why = "buckets", "its buckets are stated"
    lists = kind in ("ids", "sequence")
    buckets = stated.buckets or (len(stated.boundaries) + 1 if stated.boundaries else BUCKETS)
    return Column(
        name,
        kind,
        why,
        separator=(stated.separator or found.separator or SEPARATOR) if lists else "",
        weighted=found.weighted and lists,
        table=stated.table or (name if kind != "dense" else ""),
        longest=(stated.longest or LONGEST) if kind == "sequence" else 0,
        buckets=buckets if kind == "buckets" else 0,
        boundaries=tuple(stated.boundaries) if kind == "buckets" else (),
        log=stated.log if stated.log is not None else kind == "dense" and _is_skewed(values),
    )


def _found(name: str, values: Sequence[Any], *, is_criteo: bool) -> Column:
    if is_criteo:
        return Column(name, "id" if name in CRITEO_TEXTS else "dense", "a column of Criteo's")
    if not values:
        return Column(name, "id", f"empty in the first {SAMPLE:,} rows")
    there = [value for value in values if not is_missing_number(value)]
    numbers = [value for value in there if _is_number(value)]
    if numbers and len(numbers) >= MOSTLY * len(there):
        return _number_column(name, there, numbers)
    lists = [value for value in values if isinstance(value, (list, dict))]
    if len(lists) >= SOME * len(values):
        return _list_column(name, lists)
    if sum(SEPARATOR in str(value) for value in values) >= SOME * len(values):
        return Column(name, _list_kind(name), f"texts with {SEPARATOR!r} between values", separator=SEPARATOR)
    why = "texts"
    if 2 * len(numbers) > len(there):
        share, other = len(numbers) / len(there), next(value for value in there if not _is_number(value))
        why = f"texts, though {share:.0%} are numbers; {str(other)[:20]!r} is not"
    return Column(name, "id", why)


def _list_column(name: str, lists: Sequence[Any]) -> Column:
    weights = [_is_weighted(value) for value in lists if value != []]
    weighted = any(weights) and sum(weights) >= SOME * len(weights)  # ids without a weight have 1
    why = "lists under a name of a history" if _list_kind(name) == "sequence" else "lists"
    return Column(name, _list_kind(name), f"{why}, with weights" if weighted else why, weighted=weighted)


def _list_kind(name: str) -> Kind:
    return "sequence" if _SEQUENCE_NAME.search(name) else "ids"


def _number_column(name: str, there: Sequence[Any], values: Sequence[Any]) -> Column:
    """Returns the feature of a column of numbers.

    Args:
        there: its values that are not missing.
        values: the numbers among them.
    """
    if all(is_truth(value) for value in values):
        return Column(name, "dense", "true or false")
    texts = [value.strip() for value in values if isinstance(value, str)]
    if any(len(text) > 1 and text[0] == "0" and text.isdigit() for text in texts):
        return Column(name, "id", "digits that begin with 0")
    others = [value for value in there if not _is_whole(value)]
    if is_id_name(name) and len(others) <= (1 - MOSTLY) * len(there):
        why = "integers under a name of ids"
        if others:
            why = f"integers under a name of ids, but for {len(others):,} values such as {str(others[0])[:20]!r}"
        return Column(name, "id", why)
    if not all(_is_whole(value) for value in values):
        return Column(name, "dense", "numbers")
    if any(abs(value if isinstance(value, int) else number_of(value)) >= LARGEST_COUNT for value in values):
        return Column(name, "id", "integers too large for counts")
    return Column(name, "dense", "integers; write `kind: id` if they are codes")


def is_id_name(name: str) -> bool:
    """Returns whether a column has a name of ids, such as ``film_id``."""
    return bool(_ID_NAME.search(name) or _CAMEL_ID.search(name))


def _is_number(value: Any) -> bool:
    return isinstance(value, int) or math.isfinite(number_of(value))


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) or number_of(value).is_integer()


def _is_weighted(value: Any) -> bool:
    """Returns whether a list has a weight with each id: a dict of numbers, or pairs of an id and a number."""
    if isinstance(value, dict):
        return True
    return isinstance(value, list) and all(
        isinstance(item, (list, tuple)) and len(item) == 2 and isinstance(item[1], (int, float)) for item in value
    )


def _is_skewed(values: Sequence[Any]) -> bool:
    """Returns whether the mean absolute value is ten times the median, or the largest a thousand times."""
    sizes = sorted(size for value in values if (size := abs(number_of(value))) <= LARGEST)
    if not sizes:
        return False
    return sum(sizes) / len(sizes) > 10 * sizes[len(sizes) // 2] + 1 or sizes[-1] > 1000 * (sizes[len(sizes) // 2] + 1)


def with_table(column: Column, columns: Sequence[Column]) -> Column:
    """Returns a sequence with the table of its items' feature, found by name: ``history_item_id``, ``item_seq``."""
    if column.kind != "sequence" or column.table != column.name:
        return column
    core = _SEQUENCE_NAME.sub("_", column.name).strip("_").lower()
    for other in columns:
        if other.kind == "id" and other.name.lower() in (
            core,
            f"{core}_id",
            core.removesuffix("s"),
            f"{core.removesuffix('s')}_id",
        ):
            return replace(column, table=other.table, why=f"{column.why}; its items are of {other.name}")
    return column
