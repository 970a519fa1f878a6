"""Metrics of a run as columns of numbers, read once and then as the file grows, and made small for a curve.

Reading 200,000 lines takes about a second; afterwards only new lines are read, so a window of any width is answered
in milliseconds. A curve has the mean, least and greatest value of each of its buckets: extremes are never lost.
"""

from __future__ import annotations

import json
import os
import threading
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from stoker.files import no_link

Axis = Literal["step", "tokens", "seconds"]
AXES = ("step", "tokens", "seconds")
KEPT = 8  # runs whose columns stay in memory
MOST_COLUMNS = 256
HEAD = 256  # first bytes by which a file is recognised
Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
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
        """As the API gives it."""
        names = "mean", "min", "max"
        series = {key: dict(zip(names, map(plain, each), strict=True)) for key, each in self.series.items()}
        return {"total": self.total, "axis": self.axis, "x": plain(self.x), "series": series}


class MetricSeries:
    """The columns of one ``metrics.jsonl``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self._identity: tuple[int, bytes] = (0, b"")
        self._offset = 0  # of the first byte that has not been read
        self._count = 0
        self._columns: dict[str, array[float]] = {}
        self._last: dict[str, Any] = {}

    def refresh(self) -> None:
        """Reads what has been appended; everything, where the file is another one or has been cut."""
        with self._lock:
            try:
                with open(self._path, "rb", opener=no_link) as file:
                    found = os.fstat(file.fileno())
                    number, head = self._identity
                    now = file.read(HEAD)
                    if found.st_ino != number or found.st_size < self._offset or not now.startswith(head):
                        self._reset()
                    file.seek(self._offset)
                    self._read(file.read())
                    self._identity = found.st_ino, now[: min(len(now), self._offset)]
            except OSError:
                self._reset()

    def _read(self, content: bytes) -> None:
        whole, end, _ = content.rpartition(b"\n")
        if not end:
            return
        for line in whole.split(b"\n"):
            try:
                values = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(values, dict):
                self._add(values)
        self._offset += len(whole) + 1

    def _add(self, values: dict[str, Any]) -> None:
        self._last = values
        columns, count = self._columns, self._count
        for key, value in values.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                column = columns.get(key)
                if column is None:
                    if len(columns) >= MOST_COLUMNS:
                        continue
                    column = columns[key] = array("d")
                missing = count - len(column)
                if missing:
                    column.extend([np.nan] * missing)
                column.append(float(value))
        self._count = count + 1

    def last(self) -> dict[str, Any]:
        """The newest line; empty where there is none."""
        return self._last

    @property
    def offset(self) -> int:
        """Bytes of the file that have been read: whole lines."""
        return self._offset

    def keys(self) -> list[str]:
        """The names of all columns."""
        return list(self._columns)

    def column(self, key: str) -> Numbers:
        """A column; not a number where a line does not have it."""
        with self._lock:
            return self._column(key)

    def _column(self, key: str) -> Numbers:
        found = np.full(self._count, np.nan)
        if (kept := self._columns.get(key)) is not None:
            found[: len(kept)] = kept
        return found

    def curve(self, keys: Sequence[str], *, axis: Axis, begin: float | None, end: float | None, points: int) -> Curve:
        """The series of some keys within a window of the axis.

        Args:
            axis: ``step``; ``tokens`` that went through the model so far; ``seconds`` of all steps so far.
            begin, end: of the window, in units of the axis; None for all.
            points: most buckets.
        """
        with self._lock:
            x = self._column("step" if axis == "step" else axis)
            columns = {key: self._column(key) for key in keys if key in self._columns}
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
        return Curve(len(chosen), axis, _mean(x, starts), series)


def _buckets(values: Numbers, starts: NDArray[np.int64]) -> tuple[Numbers, Numbers, Numbers]:
    if not len(starts):
        return values[:0], values[:0], values[:0]
    return _mean(values, starts), np.fmin.reduceat(values, starts), np.fmax.reduceat(values, starts)


def _mean(values: Numbers, starts: NDArray[np.int64]) -> Numbers:
    """The mean of the finite values of each bucket."""
    if not len(starts):
        return values[:0]
    finite = np.isfinite(values)
    sums = np.add.reduceat(np.where(finite, values, 0.0), starts)
    counts = np.add.reduceat(finite.astype(np.float64), starts)
    with np.errstate(invalid="ignore"):
        return np.asarray(sums / np.where(counts > 0, counts, np.nan))


class SeriesCache:
    """The columns of the runs that were asked for last."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Path, MetricSeries] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, path: Path) -> MetricSeries:
        """The columns of a file as it is now."""
        with self._lock:
            series = self._kept.setdefault(path, MetricSeries(path))
            self._kept.move_to_end(path)
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        series.refresh()
        return series


def plain(values: Numbers) -> list[float | None]:
    """Numbers as JSON has them: null for what is not finite, seven digits for the others."""
    return [float(f"{value:.7g}") if np.isfinite(value) else None for value in values.tolist()]
