"""Encodes single rows, as a service receives them, to a batch of features, exactly as the rows of a log's files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from stoker.data.files.rows import Raw
from stoker.data.ranking.encode_columns import Arrays, ColumnEncoder
from stoker.data.ranking.features import Features
from stoker.data.ranking.log_batch import RaggedIds, RowBatch, read_batch


class BadRowError(ValueError):
    """A row that cannot be used.

    Attributes:
        row: its number, from 0.
        reason: why, a short stable phrase first.
    """

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(f"row {row}: {reason}")
        self.row, self.reason = row, reason


class EncodedColumns:
    """The columns of rows in memory, with the interface of `stoker.data.ranking.column_store.ColumnStore`."""

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays

    def array(self, name: str) -> np.ndarray:
        """Returns a column."""
        return self._arrays[name]

    def spans(self, number: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the offset and the number of each row's ids in their column; int64."""
        offsets = np.concatenate([[0], np.cumsum(self._arrays[f"lengths{number}"], dtype=np.int64)])
        return offsets[rows], offsets[rows + 1] - offsets[rows]


def encode_rows(
    rows: Sequence[Mapping[str, Any]], features: Features, known: Sequence[str] = ()
) -> tuple[RowBatch, dict[str, int]]:
    """Returns the features of rows, and fields that are not columns, with the number of rows that have them.

    Labels, time and weights are not looked at: a row that is to be scored has none.

    Args:
        features: those of a run, fitted.
        known: further columns of its log, which are not reported.

    Raises:
        BadRowError: a row cannot be used.
    """
    scored = replace(features, labels=(), positive=None, time=None, group=None, weight=None, slices=(), nested=False)
    beside = (*features.labels, *features.slices, features.time, features.group, features.weight)
    encoder = ColumnEncoder(scored, (*known, *(name for name in beside if name)))
    encoded = encoder.encode([Raw("rows", number, dict(row)) for number, row in enumerate(rows)])
    if encoded.rejected:
        first = min(encoded.rejected, key=lambda one: one.row)
        raise BadRowError(first.row, first.reason)
    return read_batch(EncodedColumns(encoded.arrays), scored, np.arange(len(rows))), encoded.unknown


def concatenate_batches(batches: Sequence[RowBatch]) -> RowBatch:
    """Several batches of the same features as one, in order; at least one."""
    if len(batches) == 1:
        return batches[0]

    def all_of(name: str) -> RaggedIds:
        parts = [batch.ids[name] for batch in batches]
        weights = None if parts[0].weights is None else np.concatenate([part.weights for part in parts])
        ids, lengths = (np.concatenate([getattr(part, key) for part in parts]) for key in ("ids", "lengths"))
        return RaggedIds(ids, lengths, weights)

    columns = {name: np.concatenate([getattr(b, name) for b in batches]) for name in ("labels", "weights", "dense")}
    return RowBatch(**columns, ids={name: all_of(name) for name in batches[0].ids})
