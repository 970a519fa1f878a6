"""A click log opened for training: its training rows, its held-out rows, and their order."""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from stoker.data.files.rows import Raw, Rejected
from stoker.data.ranking.column_kinds import SAMPLE
from stoker.data.ranking.column_store import ColumnStore, open_store
from stoker.data.ranking.drop_hints import check_has_rows, no_rows
from stoker.data.ranking.features import Features
from stoker.data.ranking.find_features import absent_columns, find_features
from stoker.data.ranking.fit_features import fit_features
from stoker.data.ranking.log_batch import RowBatch, read_batch
from stoker.data.ranking.log_growth import fingerprints_of, key_of_file
from stoker.data.ranking.log_rows import line_form, log_rows, ordered_files
from stoker.data.ranking.ranking_block import RankingBlock
from stoker.data.ranking.times import days_of
from stoker.data.sources import Source, open_source
from stoker.data.splits import ALL_ROWS
from stoker.errors import Problem, UserError
from stoker.job.blocks.source_block import SourceBlock
from stoker.job.paths import absolute, exists
from stoker.node_cache.remote_file import RemoteFile

PERIODS = 10  # into which a log is divided whose rows have neither days nor files


@dataclass(frozen=True)
class RowSet:
    """Rows of a store in the order of time.

    Attributes:
        rows: their numbers within the store, int64.
        may_grow: whether files may arrive later, so that the first one is a period even before there is a second.
    """

    store: ColumnStore
    features: Features
    rows: np.ndarray
    may_grow: bool = False

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, positions: np.ndarray) -> RowBatch:
        """Returns the rows at these positions."""
        return read_batch(self.store, self.features, self.rows[positions])

    def column(self, name: str) -> np.ndarray:
        """Returns a column with one number per row: ``time``, ``group``, ``slice<n>``."""
        return self.store.array(name)[self.rows]

    @property
    def absent(self) -> list[str]:
        """Columns by which the job asks for metrics, and in which no row has a value."""
        slices = zip(self.features.slices, self.store.summary.slices, strict=True)
        found = [name for name, values in slices if not any(values)]
        group = self.features.group
        return list(dict.fromkeys(found if group is None or self.column("grouped").any() else [group, *found]))

    @property
    def labels(self) -> np.ndarray:
        """Shape (rows, labels)."""
        return self.store.array("labels")[self.rows]

    def places(self, positions: np.ndarray) -> list[str]:
        """``file:row`` of rows."""
        files = self.store.summary.files
        return [f"{files[file]}:{row}" for file, row in self.store.array("place")[self.rows[positions]]]

    def first_ids(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the first id of each row of a feature, int64, and whether the row has one."""
        number = [column.name for column in self.features.columns].index(name)
        begin, lengths = self.store.spans(number, self.rows)
        there = lengths > 0
        found = np.zeros(len(self), dtype=np.int64)
        found[there] = self.store.array(f"column{number}")[begin[there]]
        return found, there

    def periods(self) -> np.ndarray:
        """Returns the period of each row, int64, never decreasing: its day, its file, or a tenth of all rows."""
        if self.features.time_unit is not None:
            return days_of(self.column("time"), self.features.time_unit)
        if self.by_file:
            return self.store.array("place")[self.rows][:, 0]
        return np.arange(len(self)) * PERIODS // max(1, len(self))

    @property
    def by_file(self) -> bool:
        """Whether a period is a file, if it is not a day."""
        if self.features.time is None:
            return self.may_grow or len(self.store.summary.files) > 1
        return self.may_grow and bool((np.diff(self.store.array("place")[self.rows][:, 0]) >= 0).all())

    def first_rows(self) -> np.ndarray:
        """Returns the position of the first row of each part that progressive validation evaluates, int64.

        A part is a period, or what a period has in one file if no file has rows earlier than those of the one before:
        a period that arrives in several files has the same parts whenever they arrive.
        """
        periods, files = self.periods(), self.store.array("place")[self.rows][:, 0]
        begins = np.diff(periods, prepend=periods[:1] - 1) != 0
        if (np.diff(files) >= 0).all():
            begins |= np.diff(files, prepend=files[:1] - 1) != 0
        return np.flatnonzero(begins)

    def part(self, start: int, stop: int) -> RowSet:
        """Returns the rows from one position to another."""
        return replace(self, rows=self.rows[start:stop])


@dataclass(frozen=True)
class ClickLog:
    """The training rows and the held-out rows of a click log.

    Attributes:
        paths: path of each file whose rows have the same fields, by its key (`stoker.data.ranking.log_growth`).
    """

    features: Features
    training: RowSet
    held_out: RowSet | None
    fingerprints: dict[str, str]
    paths: Mapping[str, str] = field(default_factory=dict)

    @property
    def stores(self) -> tuple[ColumnStore, ...]:
        """The stores of all rows, each once."""
        both = (self.training.store, *([self.held_out.store] if self.held_out else []))
        return both if len(both) == 2 and both[0] is not both[1] else both[:1]


def open_log(
    data: Sequence[SourceBlock],
    settings: RankingBlock,
    base: Path,
    *,
    held_out: Sequence[SourceBlock],
    fraction: float,
    progressive: bool = False,
    features: Features | None = None,
) -> ClickLog:
    """Opens a log; finds its features, and splits it by time.

    Args:
        held_out: sources that are evaluated on; where there are none, the latest ``fraction`` of the rows is.
        progressive: whether later rows are evaluated before they are trained on, so that means, scales and boundaries
            are those of the first period alone.
        features: those of a run whose log it is, with its means, scales and boundaries; None to detect them.

    Raises:
        UserError: a source cannot be read, a column is missing, or all rows are bad.
    """
    sources = open_sources(data, base)
    grows = progressive and all(source.part == ALL_ROWS for source, _ in sources)
    found = features or features_of(sources, settings, of_first_file=grows)
    store = open_store(sources, found, settings.ignore)
    check_has_rows(store, sources, settings)
    rows = _by_time(store)
    may_grow = grows and not _names_a_file(data, sources, base)
    others = open_sources(held_out, base)
    kept = len(rows) if others else len(rows) - round(fraction * len(rows))
    if kept == 0:
        raise UserError(Problem("no row is left to train on", "hold fewer out", key="evaluate.fraction"))
    fitted_to = rows[:kept]
    if progressive:  # the first period of a growing log includes its held-out rows, which change as it grows
        whole = RowSet(store, found, rows if may_grow else rows[:kept], may_grow)
        ends = [*whole.first_rows()[1:], len(whole)]
        fitted_to = whole.rows[: ends[0]]
    fitted = features or fit_features(store, fitted_to)
    training = RowSet(store, fitted, rows[:kept], may_grow)
    evaluated: RowSet | None = None
    if others:
        _check_columns(others, found)
        other = open_store(others, found, settings.ignore)
        check_has_rows(other, others, settings)
        evaluated = RowSet(other, fitted, _by_time(other))
    elif kept < len(rows):
        evaluated = RowSet(store, fitted, rows[kept:])
    prints = fingerprints_of(store.array("place")[rows][:, 0], sources, fitted) if grows else {}
    prints |= {source.name: source.fingerprint() for source, _ in (*([] if grows else sources), *others)}
    paths = {
        key_of_file(source, number, name): str(path)
        for source, form in (*sources, *others)
        for number, (path, name, _) in enumerate(ordered_files(source), 1)
        if line_form(path, form) != "libffm"
    }
    return ClickLog(fitted, training, evaluated, prints, paths)


def open_rows(data: Sequence[SourceBlock], features: Features, base: Path, ignored: Sequence[str] = ()) -> RowSet:
    """Opens the rows of sources with an existing run's features.

    Rows need no time and no weight: where a source has no such column, their order counts, or all weigh the same.

    Raises:
        UserError: a source cannot be read, a label or a feature is not a column of its rows, or all rows are bad.
    """
    sources = open_sources(data, base)
    columns = _check_columns(sources, features)
    lacks = [name for name in (features.time, features.weight) if any(name not in names for names in columns)]
    if features.time in lacks:
        features = replace(features, time=None, time_unit=None, time_in_digits=False)
    if features.weight in lacks:
        features = replace(features, weight=None)
    store = open_store(sources, features, (*ignored, *(name for name in lacks if name is not None)))
    check_has_rows(store, sources)
    return RowSet(store, features, _by_time(store))


def features_of(
    sources: Sequence[tuple[Source, str]], settings: RankingBlock, *, of_first_file: bool = False
) -> Features:
    """Returns the features of sources, found from their first rows.

    Args:
        of_first_file: whether only rows of the first file count, which are the same after others have arrived.
    """
    first = _first_rows(sources, of_first_file=of_first_file)
    if not first:
        if not any(True for source, form in sources for _ in log_rows(source, form)):
            raise no_rows(sources)
        bad = next(row for source, form in sources for row in log_rows(source, form))
        why = f"{bad.source}:{bad.row}: {bad.reason}" if isinstance(bad, Rejected) else "they are not objects"
        raise UserError(Problem(f"{sources[0][0].name}: none of the first {SAMPLE:,} rows can be read; {why}"))
    return find_features(first, settings)


def _first_rows(sources: Sequence[tuple[Source, str]], *, of_first_file: bool = False) -> list[dict[str, Any]]:
    rows = (row for source, form in sources for row in log_rows(source, form))
    some = (raw for raw in islice(rows, SAMPLE) if isinstance(raw, Raw))
    found = [(raw.source, raw.value) for raw in some if isinstance(raw.value, dict)]
    return [row for source, row in found if not of_first_file or source == found[0][0]]


def _check_columns(sources: Sequence[tuple[Source, str]], features: Features) -> list[list[str]]:
    """Returns the columns of each source that has rows.

    Raises:
        UserError: rows that a model is to be measured on lack one of its columns. Each would have no value in every
            row, and nothing but the figures would show it. Rows of libffm have the fields that occur in them.
    """
    columns = []
    for source, form in sources:
        if rows := _first_rows([(source, form)]):
            columns.append(list(dict.fromkeys(name for row in rows for name in row)))
            is_libffm = any(line_form(path, form) == "libffm" for path in source.files)
            if not is_libffm and (problems := absent_columns(features, columns[-1], source.name)):
                raise UserError(*problems)
    return columns


def open_sources(blocks: Sequence[SourceBlock], base: Path) -> list[tuple[Source, str]]:
    """Opens the sources of a log, each with the format that its block states."""
    return [(open_source(block, base), block.format) for block in blocks]


def _names_a_file(blocks: Sequence[SourceBlock], sources: Sequence[tuple[Source, str]], base: Path) -> bool:
    """Returns whether the data is one file that neither a folder nor a pattern names, in which others could arrive."""
    files = [file for source, _ in sources for file in source.files]
    if len(files) != 1:
        return False
    if isinstance(files[0], RemoteFile):
        return files[0].found.url == blocks[0].path
    path = absolute(blocks[0].path, base)
    return not path.is_dir() if exists(path) else not glob.has_magic(blocks[0].path)


def _by_time(store: ColumnStore) -> np.ndarray:
    if store.features.time is None:
        return np.arange(len(store), dtype=np.int64)
    return np.argsort(store.array("time"), kind="stable")
