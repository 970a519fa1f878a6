"""Batches of a click log: the features of some rows in the model's input form, as NumPy arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from stoker.data.ranking.features import Column, Features
from stoker.data.ranking.ids import pair_ids

LARGEST = 1e6  # standard deviations: numbers further from their mean would overflow in a float32 tower


@dataclass(frozen=True)
class RaggedIds:
    """Ids of rows.

    Attributes:
        ids: of all rows one after another, int64.
        lengths: ids of each row, int64 [rows].
        weights: of each id, float32; None if they have none.
    """

    ids: np.ndarray
    lengths: np.ndarray
    weights: np.ndarray | None = None


@dataclass(frozen=True)
class RowBatch:
    """Features and labels of rows.

    Attributes:
        labels: float32 [rows, labels].
        weights: of the rows in the loss, float32 [rows].
        dense: float32 [rows, numbers], standardised and limited to ±`LARGEST`, 0 if a number is missing.
        ids: by feature.
    """

    labels: np.ndarray
    weights: np.ndarray
    dense: np.ndarray
    ids: Mapping[str, RaggedIds]


class ColumnReader(Protocol):
    """Encoded rows; names as `stoker.data.ranking.encode_columns.ColumnEncoder` has them."""

    def array(self, name: str) -> np.ndarray:
        """Returns a column."""

    def spans(self, number: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the offset and the number of each row's ids in their column; int64."""


def read_batch(store: ColumnReader, features: Features, rows: np.ndarray) -> RowBatch:
    """Returns the features of rows.

    Args:
        features: those of the store, fitted (see `stoker.data.ranking.fit_features`).
        rows: numbers within the store, int64.
    """
    numbers = {column.name: number for number, column in enumerate(features.columns)}
    dense = [_standardised(_values(store, numbers[c.name], rows), c) for c in features.dense]
    ids: dict[str, RaggedIds] = {}
    for number, column in enumerate(features.columns):
        if column.kind == "buckets":
            ids[column.name] = _bucketised(_values(store, number, rows), column)
        elif column.kind == "cross":
            ids[column.name] = _cross(*(ids[name] for name in column.crossed))
        elif column.has_ids:
            ids[column.name] = _ragged(store, number, column, rows)
    weights = store.array("weight")[rows] if features.weight is not None else np.ones(len(rows), np.float32)
    stacked = np.stack(dense, axis=1) if dense else np.zeros((len(rows), 0), np.float32)
    return RowBatch(store.array("labels")[rows], weights, stacked, ids)


def feature_numbers(values: np.ndarray, column: Column) -> np.ndarray:
    """Returns a feature's numbers, after its logarithm if it has one; float64."""
    wide = values.astype(np.float64)
    return np.sign(wide) * np.log1p(np.abs(wide)) if column.log else wide


def positions(begin: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns the positions of all rows' ids in their column, from the first one and the number of each row; int64."""
    return np.repeat(begin - (np.cumsum(lengths) - lengths), lengths) + np.arange(lengths.sum())


def _values(store: ColumnReader, number: int, rows: np.ndarray) -> np.ndarray:
    return store.array(f"column{number}")[rows]


def _standardised(values: np.ndarray, column: Column) -> np.ndarray:
    found = (feature_numbers(values, column) - column.mean) / column.scale
    return np.nan_to_num(np.clip(found, -LARGEST, LARGEST), nan=0.0).astype(np.float32)


def _bucketised(values: np.ndarray, column: Column) -> RaggedIds:
    there = ~np.isnan(values)
    boundaries = np.asarray(column.boundaries, dtype=np.float32)  # rounded as the values are
    found = np.searchsorted(boundaries, values[there].astype(np.float32), side="right")
    return RaggedIds(found.astype(np.int64), there.astype(np.int64))


def _ragged(store: ColumnReader, number: int, column: Column, rows: np.ndarray) -> RaggedIds:
    begin, lengths = store.spans(number, rows)
    if column.longest:  # the newest are the last
        begin, lengths = begin + np.maximum(0, lengths - column.longest), np.minimum(lengths, column.longest)
    at = positions(begin, lengths)
    weights = store.array(f"weights{number}")[at] if column.weighted else None
    return RaggedIds(store.array(f"column{number}")[at], lengths, weights)


def _cross(first: RaggedIds, second: RaggedIds) -> RaggedIds:
    """Returns every pair of a row's ids of the two features."""
    lengths = first.lengths * second.lengths
    row = np.repeat(np.arange(len(lengths)), lengths)
    within = positions(np.zeros_like(lengths), lengths)
    starts = [np.cumsum(side.lengths) - side.lengths for side in (first, second)]
    of_first = starts[0][row] + within // np.maximum(1, second.lengths)[row]
    of_second = starts[1][row] + within % np.maximum(1, second.lengths)[row]
    return RaggedIds(pair_ids(first.ids[of_first], second.ids[of_second]), lengths)
