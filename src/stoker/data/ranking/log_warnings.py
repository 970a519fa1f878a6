"""Warnings about click logs that are accepted, but lack columns, or are too poor to train on or to measure with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from stoker.data.ranking.click_log import ClickLog
from stoker.data.ranking.log_growth import absent_columns

FEWEST = 10  # training rows of each value of a label


def log_warnings(log: ClickLog, item: Sequence[str]) -> list[str]:
    """Returns the warnings as text for people.

    Args:
        item: features of the item, its id first; empty if the model has no items.
    """
    return [*_absent_columns(log), *_rare_values(log), *_vague_items(log, item)]


def _absent_columns(log: ClickLog) -> Iterator[str]:
    """Yields a warning for each feature that files lack, and for the group; rows without a label are dropped."""
    files: dict[str, list[str]] = {}
    for key, names in absent_columns(log).items():
        for name in names:
            files.setdefault(name, []).append(log.paths[key])
    parts = {path: part for store in log.stores for path, part in store.summary.parts.items()}
    for name, paths in files.items():
        if name not in log.features.labels:
            rows = sum(parts[path].rows_in for path in paths)
            first = Path(paths[0]).name
            where = first if len(paths) == 1 else f"{len(paths):,} files, such as {first}"
            yield f"column {name} is not in {where}: {rows:,} rows have no value of it"


def _rare_values(log: ClickLog) -> Iterator[str]:
    """Yields warnings of labels with one value in the held-out rows, or with a rare one in the training rows."""
    training, held_out = log.training.labels, None if log.held_out is None else log.held_out.labels
    for number, name in enumerate(log.features.labels):
        rows, positive = len(training), int(training[:, number].sum(dtype=np.float64))
        rarer = min(positive, rows - positive)
        if 0 < rarer < FEWEST:
            value = int(positive == rarer)
            yield f"label {name} is {value} in {rarer:,} of {rows:,} training rows, too few to learn from"
        if held_out is not None and rarer and len(np.unique(held_out[:, number])) < 2:
            yield (
                f"label {name} has the same value in all {len(held_out):,} held-out rows, so there is no AUC; "
                "write a larger `evaluate.fraction`"
            )


def _distinct(log: ClickLog, name: str) -> int:
    ids, there = log.training.first_ids(name)
    return len(np.unique(ids[there]))


def _vague_items(log: ClickLog, item: Sequence[str]) -> Iterator[str]:
    """Yields a warning for each id of the item with more values than the first one, which then does not identify it."""
    counts = {c.name: _distinct(log, c.name) for c in log.features if c.kind == "id" and c.name in item}
    for name, count in counts.items():
        if item[0] in counts and count > counts[item[0]]:
            yield (
                f"`item` begins with {item[0]} of {counts[item[0]]:,} values, and {name} has {count:,}: retrieval "
                f"metrics rank the values of {item[0]}; write the item's id first"
            )
