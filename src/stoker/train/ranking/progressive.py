"""Progressive validation: each period of a log is evaluated before it is trained on (Blum et al., COLT 1999, "Beating
the Hold-Out: Bounds for K-fold and Progressive Cross-Validation").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stoker.data.ranking.click_log import RowSet
from stoker.data.ranking.features import Features
from stoker.runs.json_lines import append_line, read_lines
from stoker.train.ranking.evaluation_metrics import RankingFigure, RankingFigures

FILE = "progressive.jsonl"  # in the run's folder, a line a period; the last line of a repeated period counts
PREFIX = "next_"  # prefix of the metrics of a period that is about to be trained on


@dataclass(frozen=True)
class ValidationPeriod:
    """A range of rows in time order; see `RowSet.first_rows`."""

    number: int
    start: int
    stop: int


def periods_of(rows: RowSet) -> list[ValidationPeriod]:
    """Returns the periods of rows, in order."""
    if not len(rows):
        return []
    starts = rows.first_rows()
    numbers, stops = rows.periods()[starts], [*starts[1:].tolist(), len(rows)]
    return [ValidationPeriod(*one) for one in zip(numbers.tolist(), starts.tolist(), stops, strict=True)]


def write_period(folder: Path, step: int, period: ValidationPeriod, figures: RankingFigures) -> None:
    """Appends the metrics of a period: as means over the labels, and by label."""
    labels = {label: {name: figure.value for name, figure in found.items()} for label, found in figures.labels.items()}
    rows = period.stop - period.start
    place = {"step": step, "period": period.number, "first": period.start, "rows": rows}
    line = {**place, **figures.means, "labels": labels}
    append_line(folder / FILE, line)


def read_periods(folder: Path) -> list[dict[str, Any]]:
    """Reads the unique periods of a run in order; empty if there are none."""
    found = {line["first"]: line for line in read_lines(folder / FILE)}
    return sorted(found.values(), key=lambda line: int(line["step"]))


def over_periods(folder: Path, features: Features, last: int | None = None) -> RankingFigures | None:
    """Averages the metrics over the periods of a run, weighted by rows; None if it has none.

    A metric is averaged over the periods that have it: a period with a single class has no AUC.

    Args:
        last: last step whose periods count; None for all.
    """
    periods = [period for period in read_periods(folder) if last is None or period["step"] <= last]
    if not periods:
        return None
    figures = {
        name: _means([(period["labels"][name], period["rows"]) for period in periods]) for name in features.outputs
    }
    rows = sum(period["rows"] for period in periods)
    further = {"periods": periods, "step": periods[-1]["step"]}
    return RankingFigures(figures, {}, rows, further=further, averaged=len(features.labels))


def _means(found: Sequence[tuple[Mapping[str, float], int]]) -> dict[str, RankingFigure]:
    """Averages each metric of (metrics, rows), weighted by rows."""
    figures = {}
    for name in dict.fromkeys(name for values, _ in found for name in values):
        some = [(values[name], rows) for values, rows in found if name in values]
        figures[name] = RankingFigure(
            float(np.average([value for value, _ in some], weights=[rows for _, rows in some]))
        )
    return figures
