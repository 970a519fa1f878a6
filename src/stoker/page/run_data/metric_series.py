"""Metrics of a run as columns of numbers, read incrementally, and downsampled for a curve.

Only new lines are read after the first time, so a window of any width is answered in milliseconds; the columns of long
runs are also cached on disk. A curve has the mean, minimum and maximum of each of its buckets: extremes are never
lost.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from numpy.typing import NDArray

from stoker.files import no_link
from stoker.page.run_data.metric_columns import MetricColumns, Numbers
from stoker.page.run_data.metric_index import WORTH, MetricIndex
from stoker.runs.line_batches import line_batches

Axis = Literal["step", "tokens", "seconds"]
AXES = ("step", "tokens", "seconds")
KEPT = 8  # runs whose columns stay in memory
HEAD = 256  # first bytes by which a file is recognised
EXACT = 22  # the largest power of ten without an error in float64


@dataclass(frozen=True)
class BucketedSeries:
    """Series over an axis, in buckets.

    Attributes:
        total: points in the window before they were put into buckets.
        x: mean of the axis in each bucket.
        series: for each key, mean, least and greatest value of each bucket; not a number where it has none.
    """

    total: int
    axis: Axis
    x: Numbers
    series: Mapping[str, tuple[Numbers, Numbers, Numbers]]

    def as_json(self) -> dict[str, Any]:
        """Returns the curve in the API's form."""
        names = "mean", "min", "max"
        series = {key: dict(zip(names, map(json_numbers, each), strict=True)) for key, each in self.series.items()}
        return {"total": self.total, "axis": self.axis, "x": json_numbers(self.x), "series": series}


class MetricSeries:
    """The columns of one ``metrics.jsonl``.

    Args:
        kept: a folder in which the columns of long runs are cached; None for none.
    """

    def __init__(self, path: Path, kept: Path | None = None) -> None:
        self._path = path
        self._index = MetricIndex(kept, path) if kept is not None else None
        self._lock = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self._identity: tuple[int, bytes] = (0, b"")
        self._offset = 0  # of the first byte that has not been read
        self._columns = MetricColumns()

    def refresh(self) -> None:
        """Reads appended lines; all lines, if the file was replaced or truncated."""
        with self._lock:
            try:
                with open(self._path, "rb", opener=no_link) as file:
                    found = os.fstat(file.fileno())
                    number, head = self._identity
                    now = file.read(HEAD)
                    if found.st_ino != number or found.st_size < self._offset or not now.startswith(head):
                        self._reset()
                        self._restore(file)
                    self._read(file)
                    self._keep(file)
                    self._identity = found.st_ino, now[: min(len(now), self._offset)]
            except OSError:
                self._reset()

    def _restore(self, file: IO[bytes]) -> None:
        """Restores the columns that an earlier process has cached."""
        for block, columns in self._index.read(file) if self._index is not None else ():
            self._columns.add(block.count, columns, block.last)
            self._offset = block.end

    def _keep(self, file: IO[bytes]) -> None:
        """Caches the columns of new lines if there are many."""
        index, columns = self._index, self._columns
        if index is not None and columns.count - index.count >= WORTH:
            new = {key: columns.column(key, index.count) for key in columns.names()}
            index.append(file, self._offset, new, columns.last)

    def _read(self, file: IO[bytes]) -> None:
        file.seek(self._offset)
        for lines, self._offset in line_batches(file):
            self._columns.add_lines(lines)

    def last(self) -> dict[str, Any]:
        """Returns the newest line; empty if there is none."""
        return self._columns.last

    @property
    def offset(self) -> int:
        """Bytes of the file that have been read: whole lines."""
        return self._offset

    def keys(self) -> list[str]:
        """Returns the names of all columns."""
        return self._columns.names()

    def column(self, key: str) -> Numbers:
        """Returns a column; NaN for lines without it."""
        with self._lock:
            return self._columns.column(key)

    def columns(self, keys: Sequence[str]) -> dict[str, Numbers]:
        """Returns some columns, of equal length even while the file grows."""
        with self._lock:
            return {key: self._columns.column(key) for key in keys}

    def curve(
        self, keys: Sequence[str], *, axis: Axis, begin: float | None, end: float | None, points: int
    ) -> BucketedSeries:
        """Returns the series of some keys within a window of the axis.

        Args:
            axis: ``step``; ``tokens`` that went through the model so far; ``seconds`` of all steps so far.
            begin, end: of the window, in units of the axis; None for all.
            points: most buckets.
        """
        with self._lock:
            known = set(self._columns.names())
            x = self._columns.column(axis)
            columns = {key: self._columns.column(key) for key in keys if key in known}
        if axis != "step":
            x = np.cumsum(np.nan_to_num(x))
        inside = np.isfinite(x)
        if begin is not None:
            inside &= x >= begin
        if end is not None:
            inside &= x <= end
        chosen = np.flatnonzero(inside)
        x = x[chosen]
        starts = np.unique(np.linspace(0, len(chosen), min(points, len(chosen)) + 1).astype(np.int64)[:-1])
        series = {key: _buckets(column[chosen], starts) for key, column in columns.items()}
        return BucketedSeries(len(chosen), axis, _mean(x, starts), series)


def _buckets(values: Numbers, starts: NDArray[np.int64]) -> tuple[Numbers, Numbers, Numbers]:
    if not len(starts):
        return values[:0], values[:0], values[:0]
    return _mean(values, starts), np.fmin.reduceat(values, starts), np.fmax.reduceat(values, starts)


def _mean(values: Numbers, starts: NDArray[np.int64]) -> Numbers:
    """Returns the mean of the finite values of each bucket."""
    if not len(starts):
        return values[:0]
    finite = np.isfinite(values)
    sums = np.add.reduceat(np.where(finite, values, 0.0), starts)
    counts = np.add.reduceat(finite.astype(np.float64), starts)
    with np.errstate(invalid="ignore"):
        return np.asarray(sums / np.where(counts > 0, counts, np.nan))


class SeriesCache:
    """An LRU cache of the columns of runs.

    Args:
        kept: a folder in which those of long runs are cached for the next process; None for none.
    """

    def __init__(self, kept: Path | None = None) -> None:
        self._folder = kept
        self._kept: OrderedDict[Path, MetricSeries] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, path: Path) -> MetricSeries:
        """Returns the up-to-date columns of a file."""
        with self._lock:
            series = self._kept.setdefault(path, MetricSeries(path, self._folder))
            self._kept.move_to_end(path)
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        series.refresh()
        return series


def json_numbers(values: Numbers) -> list[float | None]:
    """Converts numbers to JSON values: null for non-finite ones, seven digits for the others."""
    finite = np.isfinite(values)
    size = np.abs(np.where(finite, values, 0.0))
    digits = 6 - np.floor(np.log10(np.where(size > 0, size, 1.0)))
    exact = digits <= EXACT  # powers of ten that float64 represents exactly, so that a quotient is rounded correctly
    up, down = 10.0 ** np.clip(digits, 0, EXACT), 10.0 ** np.clip(-digits, 0, None)
    rounded = np.where(exact & finite, np.rint(np.where(finite, values, 0.0) * up / down) * down / up, values)
    found: list[float | None] = rounded.tolist()
    for index in np.flatnonzero(~finite | ~exact).tolist():
        found[index] = float(f"{values[index]:.7g}") if finite[index] else None
    return found
