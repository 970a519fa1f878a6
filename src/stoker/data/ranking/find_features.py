"""Detects the features of a click log from its first rows, by rules that the audit shows with each feature."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from stoker.data.ranking.features import Column, Features, Kind
from stoker.data.ranking.float_ids import float_id_problems
from stoker.data.ranking.ids import is_missing
from stoker.data.ranking.line_formats import CRITEO, CRITEO_TEXTS
from stoker.data.ranking.numbers import LARGEST, is_missing_number, is_truth, number_of
from stoker.data.ranking.ranking_block import KINDS_OF_KEYS, FeatureBlock, RankingBlock
from stoker.data.ranking.text_lists import text_list_problems
from stoker.data.ranking.times import date_in_digits, seconds_per_unit, time_of
from stoker.errors import Problem, UserError, did_you_mean
from stoker.job.block import default_of

SAMPLE = 10_000  # rows that the features are found from
BUCKETS = 16
LONGEST = 50  # ids of a sequence
MOSTLY = 0.95  # share of numbers among the values of a number's column; the others are bad cells, or missing as NA is
SOME = 0.01  # share of lists among the values of a column of ids, and of weighted ones among its lists
TIME_NAMES = ("timestamp", "time", "ts", "datetime", "event_time", "unix_timestamp", "created_at", "click_time", "date")
GROUP_NAMES = ("user_id", "userid", "user", "uid", "qid", "query_id", "session_id")
SEPARATOR = "|"
LARGEST_COUNT = 2**31  # integers from here on are taken for ids
_ID_NAME = re.compile(r"(^|_)(ids?|uuid|uid|code|zip|zipcode|zip_code|sku|hash|key)$", re.I)
_CAMEL_ID = re.compile(r"[a-z]I[dD]s?$")
_SEQUENCE_NAME = re.compile(r"(^|_)(hist|history|seq|sequence|recent|past)(_|$)", re.I)

Row = Mapping[str, Any]


def find_features(rows: Sequence[Row], settings: RankingBlock) -> Features:
    """Returns the features of a log.

    Args:
        rows: the first ones, at most `SAMPLE`.

    Raises:
        UserError: a column that the job names is missing, or its values cannot be a feature; problems have their keys.
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    if "" in names and "" not in settings.ignore:
        message = "a column of the rows has no name, as an index that pandas writes"
        raise UserError(Problem(message, 'name it in the header, or write `ranking: {ignore: [""]}`'))
    if problems := [*_unknown(names, settings), *_bad_crosses(settings)]:
        raise UserError(*problems)
    time = settings.time or _first_of(TIME_NAMES, names, settings.ignore)
    group = settings.group or _first_of(GROUP_NAMES, names, ())
    if problems := list(_not_features(settings, time)):
        raise UserError(*problems)
    others = {*settings.labels, *settings.ignore, time, settings.weight}
    stated = {feature.name for feature in settings.features}
    others |= {"qid"} - stated  # a query's number carries no information about another query
    columns = [_column(name, rows, settings) for name in names if name not in others]
    if not columns:
        raise UserError(Problem("no column is left to be a feature", f"the columns are {', '.join(names)}"))
    columns = [column if settings.stated(column.name).table else _with_table(column, columns) for column in columns]
    values = {name: [row[name] for row in rows if name in row and not is_missing(row[name])] for name in stated}
    without_effect, unshared = _without_effect(columns, values, settings), _unshared_tables(columns, settings)
    crosses, lists = _crosses_of_no_ids(columns, settings), text_list_problems(columns, rows, settings)
    if problems := [*without_effect, *unshared, *crosses, *lists, *float_id_problems(columns, rows)]:
        raise UserError(*problems)
    for pair in settings.crosses:
        name = " x ".join(pair)
        if any(column.name == name for column in columns):
            message = f"the rows have a column {name!r}, as the cross is called"
            raise UserError(Problem(message, f"add {name} to `ranking.ignore`", key="ranking.crosses"))
        columns.append(Column(name, "cross", "ranking.crosses", crossed=tuple(pair), table=name))
    unit, in_digits = _time_unit([row.get(time) for row in rows] if time is not None else [])
    return Features(
        labels=settings.labels,
        columns=tuple(columns),
        positive=settings.positive,
        time=time,
        time_unit=unit,
        group=group,
        weight=settings.weight,
        slices=tuple(settings.slices),
        nested=settings.nested,
        time_in_digits=in_digits,
    )


def _time_unit(values: Sequence[Any]) -> tuple[float | None, bool]:
    """Returns the unit of times in seconds, None if they do not count from 1970, and whether they are in digits."""
    numbers = [number for value in values if math.isfinite(number := number_of(value))]
    dates = sum(date_in_digits(number) is not None for number in numbers)
    if dates and dates >= MOSTLY * len(numbers):
        return 1.0, True
    times = []
    for value in values:
        with suppress(ValueError):
            times.append(time_of(value))
    return seconds_per_unit(times), False


def _first_of(wanted: Iterable[str], names: Sequence[str], without: Iterable[str]) -> str | None:
    low = {name.lower(): name for name in names if name not in without}
    return next((low[name] for name in wanted if name in low), None)


def _unknown(names: Sequence[str], settings: RankingBlock) -> list[Problem]:
    problems = []
    for key, name in settings.named:
        if name not in names:
            columns = ", ".join(names[:40])
            hint = f"the columns are {columns}; write the name of one"
            if key in ("time", "group", "weight"):
                hint = f"the columns are {columns}; write the name of one, or remove `{key}`"
            hint = did_you_mean(name, names) or hint
            problems.append(Problem(f"the rows have no column {name!r}", hint, key=f"ranking.{key}"))
    return problems


def absent_columns(features: Features, names: Sequence[str], place: str) -> list[Problem]:
    """Returns a problem for each label and feature of a run that is not a column of other rows.

    Args:
        names: the columns of these rows.
        place: where they are.
    """
    wanted = [*features.labels, *(column.name for column in features.columns if column.stored)]
    known = {*wanted, features.time, features.group, features.weight}
    others = [name for name in names if name not in known]
    problems = []
    for name in wanted:
        if name not in names:
            empty = (
                "add the label of each row"
                if name in features.labels
                else "add it; leave it empty if there is no value"
            )
            hint = did_you_mean(name, others) or empty
            problems.append(
                Problem(f"the rows of {place} have no column {name!r}, which the model was trained on", hint)
            )
    return problems


def _not_features(settings: RankingBlock, time: str | None) -> Iterator[Problem]:
    """Yields settings of features whose columns are no features."""
    keys = dict.fromkeys(settings.ignore, "ignore") | dict.fromkeys(settings.labels, "label")
    keys |= {name: key for key, name in (("weight", settings.weight), ("time", time)) if name is not None}
    for index, feature in enumerate(settings.features):
        if (key := keys.get(feature.name)) is None:
            continue
        message = f"{feature.name} is named by `{key}`, so it is not a feature"
        hint = "remove it here or there"
        if key == "time" and settings.time is None:
            message = f"{feature.name} is the time of the rows, found by its name, so it is not a feature"
            hint = "remove it here, or write another column as `time`"
        yield Problem(message, hint, key=f"ranking.features[{index}].name")


def _without_effect(
    columns: Sequence[Column], values: Mapping[str, Sequence[Any]], settings: RankingBlock
) -> Iterator[Problem]:
    """Yields settings of features that have no effect on the kind that was found.

    Args:
        values: the first values of each feature with settings.
    """
    kinds = {column.name: column.kind for column in columns}
    for index, feature in enumerate(settings.features):
        if feature.kind != "auto" or feature.name not in kinds:
            continue
        name, kind, key = feature.name, kinds[feature.name], f"ranking.features[{index}]"
        texts = [value for value in values[name] if not isinstance(value, (list, dict))]
        if feature.separator and values[name] and not any(feature.separator in str(value) for value in texts):
            message = f"no value of {name} contains {feature.separator!r} in the first {SAMPLE:,} rows"
            hint = "remove `separator`: its values are lists"
            if texts:
                hint = f"one is {str(texts[0])[:40]!r}; write its separator, or also `kind: ids`"
            yield Problem(message, hint, key=f"{key}.separator")
        for setting in ("longest", "table", "log"):
            kinds_of_key = KINDS_OF_KEYS[setting]
            is_stated = getattr(feature, setting) != default_of(FeatureBlock, setting)
            if is_stated and kind not in kinds_of_key:
                message = f"`{setting}` has no effect: {name} is found to be of `kind: {kind}`"
                hint = f"also write `kind: {kinds_of_key[0]}`, or remove it"
                yield Problem(message, hint, key=f"{key}.{setting}")


def _unshared_tables(columns: Sequence[Column], settings: RankingBlock) -> Iterator[Problem]:
    """Yields tables of features that no other feature has; a feature's own name is a table of its own."""
    tables = {column.name: column.table for column in columns if column.has_ids}
    for index, feature in enumerate(settings.features):
        others = {name: table for name, table in tables.items() if name != feature.name}
        wanted = feature.table
        if not wanted or feature.name not in tables or wanted == feature.name or wanted in others.values():
            continue
        known = f"features with ids are {', '.join(others)}" if others else "remove `table`"
        hint = did_you_mean(wanted, [*others, *others.values()]) or known
        if wanted in others:
            hint = f"{wanted} has the table {others[wanted]}"
        yield Problem(f"no other feature has the table {wanted}", hint, key=f"ranking.features[{index}].table")


def _bad_crosses(settings: RankingBlock) -> Iterator[Problem]:
    for index, pair in enumerate(settings.crosses):
        if len(pair) != 2 or pair[0] == pair[1]:
            key = f"ranking.crosses[{index}]"
            yield Problem("a cross is of two features", "write it as [user_id, genre]", key=key)


def _crosses_of_no_ids(columns: Sequence[Column], settings: RankingBlock) -> Iterator[Problem]:
    found = {column.name: column for column in columns}
    for index, pair in enumerate(settings.crosses):
        for name in pair:
            key = f"ranking.crosses[{index}]"
            if name not in found:
                with_ids = ", ".join(column.name for column in columns if column.has_ids)
                yield Problem(
                    f"{name} is not a feature, and a cross combines two features",
                    f"those with ids are {with_ids}",
                    key=key,
                )
            elif not found[name].has_ids:
                hint = f"write `features: [{{name: {name}, kind: buckets}}]`"
                yield Problem(f"{name} is a number, and a cross is of ids", hint, key=key)


def _column(name: str, rows: Sequence[Row], settings: RankingBlock) -> Column:
    values = [row[name] for row in rows if name in row and not is_missing(row[name])]
    found = _found(name, values, is_criteo=CRITEO[-1] in rows[0] and len(rows[0]) == len(CRITEO))
    stated = settings.stated(name)
    kind, why = (stated.kind, "stated") if stated.kind != "auto" else (found.kind, found.why)
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
    if (_ID_NAME.search(name) or _CAMEL_ID.search(name)) and len(others) <= (1 - MOSTLY) * len(there):
        why = "integers under a name of ids"
        if others:
            why = f"integers under a name of ids, but for {len(others):,} values such as {str(others[0])[:20]!r}"
        return Column(name, "id", why)
    if not all(_is_whole(value) for value in values):
        return Column(name, "dense", "numbers")
    if any(abs(value if isinstance(value, int) else number_of(value)) >= LARGEST_COUNT for value in values):
        return Column(name, "id", "integers too large for counts")
    return Column(name, "dense", "integers; write `kind: id` if they are codes")


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


def _with_table(column: Column, columns: Sequence[Column]) -> Column:
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
