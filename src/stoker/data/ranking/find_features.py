"""Detects the features of a click log from its first rows, by rules that the audit shows with each feature."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from stoker.data.ranking.cell_forms import FORMS, CellForms, count_forms, lost_forms
from stoker.data.ranking.column_kinds import MOSTLY, SAMPLE, column_of, with_table
from stoker.data.ranking.features import Column, Features
from stoker.data.ranking.ids import is_missing
from stoker.data.ranking.line_formats import CRITEO
from stoker.data.ranking.numbers import number_of
from stoker.data.ranking.ranking_block import KINDS_OF_KEYS, FeatureBlock, RankingBlock
from stoker.data.ranking.times import date_in_digits, seconds_per_unit, time_of
from stoker.errors import Problem, UserError, did_you_mean
from stoker.job.block import default_of

TIME_NAMES = ("timestamp", "time", "ts", "datetime", "event_time", "unix_timestamp", "created_at", "click_time", "date")
GROUP_NAMES = ("user_id", "userid", "user", "uid", "qid", "query_id", "session_id")

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
    time, group = time_and_group(names, settings)
    if problems := list(_not_features(settings, time)):
        raise UserError(*problems)
    columns = _columns(names, rows, settings, time)
    if problems := list(_bad_columns(columns, rows, settings)):
        raise UserError(*problems)
    unit, in_digits = _time_unit([row.get(time) for row in rows] if time is not None else [])
    return Features(
        labels=settings.labels,
        columns=(*columns, *_crosses(columns, settings)),
        positive=settings.positive,
        time=time,
        time_unit=unit,
        group=group,
        weight=settings.weight,
        slices=tuple(settings.slices),
        nested=settings.nested,
        time_in_digits=in_digits,
    )


def time_and_group(names: Sequence[str], settings: RankingBlock) -> tuple[str | None, str | None]:
    """Returns the columns of the time and of the group: those that the job names, else those found by their names."""
    time = settings.time or _first_of(TIME_NAMES, names, settings.ignore)
    return time, settings.group or _first_of(GROUP_NAMES, names, ())


def _columns(names: Sequence[str], rows: Sequence[Row], settings: RankingBlock, time: str | None) -> list[Column]:
    """Returns the features that are columns of the rows."""
    others = {*settings.labels, *settings.ignore, time, settings.weight}
    others |= {"qid"} - {feature.name for feature in settings.features}  # a query's number says nothing of another
    is_criteo = CRITEO[-1] in rows[0] and len(rows[0]) == len(CRITEO)
    values = {name: _values(name, rows) for name in names if name not in others}
    columns = [column_of(name, found, settings.stated(name), is_criteo) for name, found in values.items()]
    if not columns:
        raise UserError(Problem("no column is left to be a feature", f"the columns are {', '.join(names)}"))
    return [column if settings.stated(column.name).table else with_table(column, columns) for column in columns]


def _values(name: str, rows: Sequence[Row]) -> list[Any]:
    return [row[name] for row in rows if name in row and not is_missing(row[name])]


def _bad_columns(columns: Sequence[Column], rows: Sequence[Row], settings: RankingBlock) -> Iterator[Problem]:
    """Yields settings that do not fit the columns, and columns whose values cannot be a feature."""
    yield from _without_effect(columns, rows, settings)
    yield from _unshared_tables(columns, settings)
    yield from _crosses_of_no_ids(columns, settings)
    stated = {feature.name: index for index, feature in enumerate(settings.features)}
    with_ids = {column.name: column for column in columns if column.kind in FORMS}
    forms = {name: CellForms() for name in with_ids}
    for row in rows:
        count_forms(forms, row)
    for name, message, hint in lost_forms(with_ids, forms):
        yield Problem(message, hint, key=f"ranking.features[{stated[name]}].name" if name in stated else "data[0].path")


def _crosses(columns: Sequence[Column], settings: RankingBlock) -> Iterator[Column]:
    """Yields the features that cross two others."""
    for pair in settings.crosses:
        name = " x ".join(pair)
        if any(column.name == name for column in columns):
            message = f"the rows have a column {name!r}, as the cross is called"
            raise UserError(Problem(message, f"add {name} to `ranking.ignore`", key="ranking.crosses"))
        yield Column(name, "cross", "ranking.crosses", crossed=tuple(pair), table=name)


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


def _without_effect(columns: Sequence[Column], rows: Sequence[Row], settings: RankingBlock) -> Iterator[Problem]:
    """Yields settings of features that have no effect on the kind that was found."""
    kinds = {column.name: column.kind for column in columns}
    for index, feature in enumerate(settings.features):
        if feature.kind != "auto" or feature.name not in kinds:
            continue
        name, kind, key = feature.name, kinds[feature.name], f"ranking.features[{index}]"
        values = _values(name, rows) if feature.separator else []
        texts = [value for value in values if not isinstance(value, (list, dict))]
        if feature.separator and values and not any(feature.separator in str(value) for value in texts):
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
