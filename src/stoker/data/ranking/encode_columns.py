"""Encodes rows as arrays, column by column; unusable rows are left out, each with its reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from stoker.data.files.rows import Raw, Rejected
from stoker.data.ranking.features import NUMBERS, Column, Features
from stoker.data.ranking.ids import IdsOfValues, is_missing
from stoker.data.ranking.numbers import LARGEST, is_missing_number, number_of
from stoker.data.ranking.times import is_in_unit, time_of

SLICES = 1000  # values of a column that metrics are given by; all others are one
OTHER = "(others)"
_LABELS = {0.0: 0.0, 1.0: 1.0, -1.0: 0.0}
_SHOWN = 40  # characters of a value in a reason
OTHER_LABEL = "unknown label"  # the reason of a row whose label is a number other than 0 and 1
NOT_NESTED = "conversion without a click"  # the reason of a row whose labels contradict each other
OTHER_TIME = "time in another unit"  # the reason of a row whose time does not fit the unit of the first rows
NOT_AN_ID = "not an id"  # the reason of a row whose value of a feature cannot be an id begins with it

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class EncodedRows:
    """Rows as arrays.

    Attributes:
        arrays: by the name of their file, first dimension rows (of ids: values); see `ColumnEncoder`.
        rows: how many there are.
        rejected: those that are not among them.
        unknown: fields of rows that are not columns, and how many rows have them.
    """

    arrays: Arrays
    rows: int
    rejected: list[Rejected]
    unknown: dict[str, int] = field(default_factory=dict)


class _BadRowsError(Exception):
    """A column cannot be read from some rows; has their numbers, and why."""

    def __init__(self, reasons: Mapping[int, str]) -> None:
        self.reasons = reasons


class ColumnEncoder:
    """Turns batches of rows into arrays.

    ``labels`` [rows, labels] float32, ``time`` float64, ``weight`` float32, ``group`` int64 and ``grouped`` bool
    (whether the row has a group), ``place`` [rows, 2] int64 (file and row), ``slice<n>`` int32; of the n-th feature
    ``column<n>``: float32 of a number, NaN where it is missing; otherwise int64, the ids of all rows one after another,
    with ``lengths<n>`` int32 and, if they have weights, ``weights<n>`` float32.
    """

    def __init__(self, features: Features, known: Iterable[str] = ()) -> None:
        """
        Args:
            known: columns that are ignored on purpose.
        """
        self.features = features
        self.files: dict[str, int] = {}
        self.slices: list[dict[str, int]] = [{} for _ in features.slices]
        self._ids = {column.name: IdsOfValues() for column in features.columns}
        self._group_ids = IdsOfValues()
        self._known = {*known, *features.labels, *features.slices, features.time, features.group, features.weight}
        self._known |= {column.name for column in features.columns}

    def resume(self, files: Sequence[str], slices: Sequence[Sequence[str]]) -> None:
        """Continues after another encoder's rows, with its files and its values of slices."""
        self.files = {name: number for number, name in enumerate(files)}
        for codes, texts in zip(self.slices, slices, strict=False):
            codes.update((text, code) for code, text in enumerate(texts))

    def encode(self, rows: Sequence[Raw | Rejected]) -> EncodedRows:
        """Returns the arrays of a batch of rows."""
        rejected = [row for row in rows if isinstance(row, Rejected)]
        good = [row for row in rows if isinstance(row, Raw)]
        while True:
            values = [row.value for row in good if isinstance(row.value, dict)]
            try:
                arrays = self._arrays(values)
                break
            except _BadRowsError as error:
                rejected += [Rejected(good[i].source, good[i].row, why) for i, why in error.reasons.items()]
                good = [row for number, row in enumerate(good) if number not in error.reasons]
        places = [(self.files.setdefault(row.source, len(self.files)), row.row) for row in good]
        arrays["place"] = np.array(places, dtype=np.int64).reshape(-1, 2)
        if len(rejected) > 1:  # in the order of the log, whatever the reason
            order = {(row.source, row.row): number for number, row in enumerate(rows)}
            rejected.sort(key=lambda row: order[row.source, row.row])
        unknown = Counter(name for value in values for name in value.keys() - self._known)
        return EncodedRows(arrays, len(good), rejected, unknown)

    def _arrays(self, rows: Sequence[dict[str, Any]]) -> Arrays:
        features = self.features

        def cells(name: str) -> list[Any]:
            return [row.get(name) for row in rows]

        labels = [
            _each(cells(name), partial(_label, positive=features.positive, name=name)) for name in features.labels
        ]
        if features.nested:
            _check_nested(labels, features.labels)
        arrays = {"labels": np.array(labels, dtype=np.float32).T.reshape(len(rows), len(features.labels))}
        if features.time is not None:
            arrays["time"] = np.array(_each(cells(features.time), partial(_time, features=features)), dtype=np.float64)
        if features.weight is not None:
            weights = _each(cells(features.weight), partial(_row_weight, name=features.weight))
            arrays["weight"] = np.array(weights, dtype=np.float32)
        if features.group is not None:
            groups = cells(features.group)
            arrays["group"] = np.array(_each(groups, self._group), dtype=np.int64)
            arrays["grouped"] = np.array([not is_missing(value) for value in groups], dtype=np.bool_)
        for number, name in enumerate(features.slices):
            codes = self.slices[number]
            arrays[f"slice{number}"] = np.array([_code(codes, value) for value in cells(name)], dtype=np.int32)
        for number, column in enumerate(features.columns):
            if column.kind in NUMBERS:
                arrays[f"column{number}"] = _numbers(cells(column.name), column.name)
            elif column.stored:
                arrays |= self._lists(number, column, cells(column.name))
        return arrays

    def _group(self, value: Any) -> int:
        return 0 if is_missing(value) else _id(self._group_ids, value, str(self.features.group))

    def _lists(self, number: int, column: Column, cells: list[Any]) -> Arrays:
        """Returns the ids of a feature, of all rows one after another."""
        ids_of = self._ids[column.name]
        if column.kind == "id":
            there = [not is_missing(value) for value in cells]
            try:
                found = [ids_of[value] for value, is_there in zip(cells, there, strict=True) if is_there]
                return {f"column{number}": _int64(found), f"lengths{number}": np.array(there, dtype=np.int32)}
            except (ValueError, TypeError):
                _each(cells, lambda v: None if is_missing(v) else _id(ids_of, v, column.name))
                raise
        items = _each(cells, lambda value: items_of(value, column))
        pairs = _each(items, lambda row: [(_id(ids_of, item, column.name), weight) for item, weight in row])
        arrays = {
            f"column{number}": _int64([found for row in pairs for found, _ in row]),
            f"lengths{number}": np.array([len(row) for row in pairs], dtype=np.int32),
        }
        if column.weighted:
            arrays[f"weights{number}"] = np.array([weight for row in pairs for _, weight in row], dtype=np.float32)
        return arrays


def _each(values: Sequence[Any], change: Callable[[Any], Any]) -> list[Any]:
    """Converts the values one by one; raises the errors of all invalid ones together."""
    out, reasons = [], {}
    for number, value in enumerate(values):
        try:
            out.append(change(value))
        except ValueError as error:
            reasons[number] = str(error)
    if reasons:
        raise _BadRowsError(reasons)
    return out


def _int64(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def _label(value: Any, positive: float | None, name: str) -> float:
    if is_missing(value):
        raise ValueError(f"no label: {name}")
    number, shown = number_of(value), str(value)[:_SHOWN]
    if positive is not None:
        if not np.isfinite(number):
            raise ValueError(f"not a label: {name} is {shown!r}, which is not a number")
        return float(number >= positive)
    if number not in _LABELS:
        kind = "not a label" if np.isnan(number) else OTHER_LABEL
        raise ValueError(f"{kind}: {name} is {shown!r}, and labels are 0 and 1")
    return _LABELS[number]


def _check_nested(labels: Sequence[Sequence[float]], names: Sequence[str]) -> None:
    reason = f"{NOT_NESTED}: {names[1]} is positive and {names[0]} is not"
    rows = enumerate(zip(*labels, strict=True))
    if reasons := {number: reason for number, (click, conversion) in rows if conversion > click}:
        raise _BadRowsError(reasons)


def _time(value: Any, features: Features) -> float:
    name, unit = features.time, features.time_unit
    if is_missing(value):
        raise ValueError(f"no time: {name}")
    try:
        time = time_of(value, in_digits=features.time_in_digits)
    except ValueError as error:
        raise ValueError(f"{error} in {name}") from None
    if unit is not None and not is_in_unit(time, unit):
        shown = str(value)[:_SHOWN]
        raise ValueError(f"{OTHER_TIME}: {name} is {shown!r}, and the first rows count units of {unit:g} s since 1970")
    return time


def _row_weight(value: Any, name: str) -> float:
    weight = number_of(value)
    if not 0 <= weight <= LARGEST:
        raise ValueError(f"not a weight: {name} is {str(value)[:_SHOWN]!r}")
    return weight


def _code(codes: dict[str, int], value: Any) -> int:
    text = "" if is_missing(value) else str(value).strip()
    if text in codes:
        return codes[text]
    return codes.setdefault(text if len(codes) < SLICES else OTHER, len(codes))


def _numbers(cells: list[Any], name: str) -> np.ndarray:
    found = np.array([number_of(cell) for cell in cells], dtype=np.float64)
    without = np.flatnonzero(~(np.abs(found) <= LARGEST)).tolist()
    reasons = {number: _no_number(cells[number], name) for number in without if not is_missing_number(cells[number])}
    if reasons:
        raise _BadRowsError(reasons)
    return found.astype(np.float32)


def _no_number(cell: Any, name: str) -> str:
    if np.isfinite(number_of(cell)):
        return f"number out of range: {name} is {str(cell)[:_SHOWN]!r}, beyond float32"
    return f"not a number: {name} is {str(cell)[:_SHOWN]!r}"


def _id(ids_of: IdsOfValues, value: Any, name: str) -> int:
    try:
        return ids_of[value]
    except TypeError:  # a list is not a key
        raise ValueError(f"not an id: a value of type {type(value).__name__} in {name}") from None
    except ValueError as error:
        raise ValueError(f"{error} in {name}") from None


def column_without_ids(reason: str, features: Features) -> str | None:
    """Returns the feature whose value is not an id, by the reason of a dropped row; None for other reasons."""
    if not reason.startswith(NOT_AN_ID):
        return None
    return max((column.name for column in features if reason.endswith(f" in {column.name}")), key=len, default=None)


def items_of(value: Any, column: Column) -> list[tuple[Any, float]]:
    """Returns (value, weight) of each item of a cell."""
    if isinstance(value, dict):
        if value and not column.weighted:
            raise ValueError(f"weights of ids: {column.name} had none when the features were detected")
        pairs = list(value.items())
    elif isinstance(value, (list, tuple)):
        pairs = [tuple(item) if column.weighted and isinstance(item, (list, tuple)) else (item, 1.0) for item in value]
    elif is_missing(value):
        return []
    elif not isinstance(value, str):
        pairs = [(value, 1.0)]
    else:
        texts = [text for text in value.split(column.separator) if text]
        pairs = [_weighted(text) if column.weighted else (text, 1.0) for text in texts]
    out = []
    for pair in pairs:
        if len(pair) != 2 or not abs(weight := number_of(pair[1])) <= LARGEST:
            raise ValueError(f"not an id with its weight: {str(pair)[:_SHOWN]} in {column.name}")
        if not is_missing(pair[0]):
            out.append((pair[0], weight))
    return out


def _weighted(text: str) -> tuple[str, str]:
    name, colon, weight = text.rpartition(":")
    return (name, weight) if colon else (text, "1")
