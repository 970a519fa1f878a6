"""Progressive validation: each period of a log is evaluated before it is trained on (Blum et al., COLT 1999, "Beating
the Hold-Out: Bounds for K-fold and Progressive Cross-Validation").
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stoker.data.ranking.click_log import RowSet
from stoker.files import read_file
from stoker.train.ranking.figures import Figure, RankingFigures

FILE = "progressive.jsonl"  # in the run's folder, a line a period; of a period that was done again the last one counts
PREFIX = "next_"  # of metrics of a period that is about to be trained on


@dataclass(frozen=True)
class Period:
    """Rows from one position to another, in the order of time."""

    number: int
    start: int
    stop: int


def periods_of(rows: RowSet) -> list[Period]:
    """The periods of rows, in their order."""
    if not len(rows):
        return []
    numbers, starts = np.unique(rows.periods(), return_index=True)
    order = np.argsort(starts)
    stops = [*starts[order][1:].tolist(), len(rows)]
    return [Period(int(numbers[n]), int(starts[n]), stop) for n, stop in zip(order, stops, strict=True)]


def write_period(folder: Path, step: int, period: Period, figures: Mapping[str, float]) -> None:
    """Appends what was found of a period."""
    line = {"step": step, "period": period.number, "rows": period.stop - period.start, **figures}
    with (folder / FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def read_periods(folder: Path) -> list[dict[str, Any]]:
    """The periods of a run in their order, each once; empty where there are none."""
    if not (folder / FILE).is_file():
        return []
    found = {line["period"]: line for line in map(json.loads, read_file(folder / FILE).splitlines())}
    return sorted(found.values(), key=lambda line: int(line["step"]))


def over_periods(folder: Path, label: str) -> RankingFigures | None:
    """The metrics of all periods of a run, as means weighed by rows; None where it has none."""
    periods = read_periods(folder)
    if not periods:
        return None
    names = [name for name in periods[0] if name not in ("step", "period", "rows")]
    figures = {}
    for name in names:
        some = [(period[name], period["rows"]) for period in periods if name in period]
        figures[name] = Figure(float(np.average([v for v, _ in some], weights=[rows for _, rows in some])))
    rows = sum(period["rows"] for period in periods)
    return RankingFigures({label: figures}, {}, rows, further={"periods": periods, "step": periods[-1]["step"]})
