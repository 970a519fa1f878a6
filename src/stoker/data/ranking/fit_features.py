"""Fits means, scales and bucket boundaries of numbers to the training rows alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from stoker.data.ranking.column_store import ColumnStore
from stoker.data.ranking.features import NUMBERS, Column, Features
from stoker.data.ranking.log_batch import feature_numbers

ROWS = 1_000_000  # most rows that are fitted to, evenly spaced


def fit_features(store: ColumnStore, rows: np.ndarray) -> Features:
    """Returns the features of a store with the means, scales and boundaries of some of its rows, the training part."""
    features = store.features
    spaced = rows[:: max(1, -(-len(rows) // ROWS))]
    fitted: dict[str, Column] = {}
    for number, column in enumerate(features.columns):
        if column.kind in NUMBERS:
            values = store.array(f"column{number}")[spaced]
            fitted[column.name] = _fitted(column, values[~np.isnan(values)])
    return features.with_columns(fitted)


def _fitted(column: Column, values: np.ndarray) -> Column:
    if column.kind == "buckets":
        if column.boundaries or not len(values):
            return column
        shares = np.arange(1, column.buckets) / column.buckets
        return replace(column, boundaries=tuple(np.unique(np.quantile(values.astype(np.float64), shares)).tolist()))
    found = feature_numbers(values, column)
    if not len(found):
        return column
    scale = float(found.std()) if found.min() < found.max() else 1.0  # of equal logarithms it is a rounding error
    return replace(column, mean=float(found.mean()), scale=scale)
