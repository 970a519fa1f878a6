"""Single rows of a click log as a model receives them, for `stoker data --rows`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from stoker.data.files.rows import Raw, Rejected, names_file
from stoker.data.ranking.click_log import ClickLog
from stoker.data.ranking.encode_columns import ColumnEncoder, items_of
from stoker.data.ranking.encode_rows import EncodedColumns
from stoker.data.ranking.features import Column, Features
from stoker.data.ranking.ids import is_missing, text_id
from stoker.data.ranking.log_batch import RaggedIds, RowBatch, read_batch
from stoker.data.ranking.log_rows import file_rows, in_order, log_rows
from stoker.data.sources import Source
from stoker.data.splits import ALL_ROWS
from stoker.errors import Problem, UserError

LONGEST = 60  # characters of a value
IDS = 8  # of a feature that are shown


@dataclass(frozen=True)
class LogField:
    """A feature, a label or another column of a row.

    Attributes:
        value: in the file, as JSON; empty for a cross.
        encoded: what the model receives, as text for people.
    """

    name: str
    kind: str
    value: str
    encoded: str


@dataclass(frozen=True)
class LogRowView:
    """A row of a click log.

    Attributes:
        part: ``training``, ``held out``, or empty for neither.
        dropped: why the row was dropped; empty if it was not.
    """

    source: str
    row: int
    part: str
    dropped: str
    fields: tuple[LogField, ...] = ()


def rows_of_log(
    log: ClickLog, sources: Sequence[tuple[Source, str]], wanted: Sequence[tuple[str, int]], ignored: Sequence[str]
) -> tuple[LogRowView, ...]:
    """Returns rows as they are encoded.

    Args:
        sources: of the log, each with its format.
        wanted: the name of a source or of a file, with or without its folders, and the number of the row in it.
        ignored: columns that are left out on purpose.

    Raises:
        UserError: there is no such row.
    """
    found = []
    for name, number in wanted:
        rows = list(_rows(sources, name, number))
        if not rows:
            names = ", ".join(source.name for source, _ in sources)
            raise UserError(Problem(f"--rows {name}:{number}: there is no such row", f"the sources are {names}"))
        found += [_view(log, row, ignored) for row in rows]
    return tuple(found)


def _rows(sources: Iterable[tuple[Source, str]], name: str, number: int) -> Iterator[Raw | Rejected]:
    """Yields the rows of that number in each file of the name, of which several sources may have one."""
    for source, form in sources:
        streams = [log_rows(source, form)]
        if not source.corpus and source.part == ALL_ROWS:  # only the files of that name are read, up to the row
            paths = in_order(source.files)
            streams = [file_rows(path, form) for path in paths if name == source.name or names_file(name, str(path))]
        for stream in streams:
            rows = (row for row in stream if name == source.name or names_file(name, row.source))
            yield from islice((row for row in rows if row.row == number), 1)


def _view(log: ClickLog, row: Raw | Rejected, ignored: Sequence[str]) -> LogRowView:
    encoded = ColumnEncoder(log.features, ignored).encode([row])
    if encoded.rejected:
        return LogRowView(row.source, row.row, "", encoded.rejected[0].reason)
    assert isinstance(row, Raw) and isinstance(row.value, dict)
    batch = read_batch(EncodedColumns(encoded.arrays), log.features, np.arange(1))
    fields = (*_beside(row.value, encoded.arrays, log.features), *_features(row.value, batch, log.features))
    return LogRowView(row.source, row.row, _part(log, row), "", fields)


def _part(log: ClickLog, row: Raw) -> str:
    for name, rows in (("training", log.training), ("held out", log.held_out)):
        files = rows.store.summary.files if rows is not None else ()
        if rows is not None and row.source in files:
            place = (files.index(row.source), row.row)
            if (rows.column("place") == place).all(1).any():
                return name
    return ""


def _beside(values: dict[str, Any], arrays: dict[str, np.ndarray], features: Features) -> Iterator[LogField]:
    """Yields the columns that are not features."""
    for name, label in zip(features.labels, arrays["labels"][0].tolist(), strict=True):
        yield LogField(name, "label", _shown(values.get(name)), f"{label:g}")
    for kind, column in (("weight", features.weight), ("time", features.time), ("group", features.group)):
        if column is not None:
            yield LogField(column, kind, _shown(values.get(column)), str(arrays[kind][0].item()))


def _features(values: dict[str, Any], batch: RowBatch, features: Features) -> Iterator[LogField]:
    dense = iter(batch.dense[0].tolist())
    for column in features.columns:
        value = values.get(column.name)
        if column.kind == "dense":
            words = f"{next(dense):.6g}" + (", as it is missing" if is_missing(value) else "")
        elif column.kind == "buckets":
            words = "".join(f"bucket {n} of {len(column.boundaries) + 1}, from 0" for n in batch.ids[column.name].ids)
        else:
            words = _ids(value, batch.ids[column.name], column)
        yield LogField(column.name, column.kind, _shown(value) if column.stored else "", words or "none")


def _ids(value: Any, found: RaggedIds, column: Column) -> str:
    """Returns the ids of a row, and which of them are hashes of texts or of pairs."""
    ids = found.ids.tolist()
    items = [(value, 1.0)] if column.kind == "id" else items_of(value, column) if column.stored else []
    texts = [str(item).strip() for item, _ in items[len(items) - len(ids) :]] if items else [""] * len(ids)
    words = []
    for number, (each, text) in enumerate(zip(ids[:IDS], texts, strict=False)):
        is_hash = not column.stored or each == text_id(text)
        weight = "" if found.weights is None else f" with weight {found.weights[number]:g}"
        words.append(f"{'hash ' if is_hash else ''}{each}{weight}")
    more = [f"and {len(ids) - IDS:,} more"] if len(ids) > IDS else []
    cut = [f"the newest {len(ids)} of {len(items)}"] if len(items) > len(ids) > 0 else []
    return ", ".join([*words, *more, *cut])


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
