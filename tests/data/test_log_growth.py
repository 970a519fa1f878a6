"""A growing log: what a run that has trained on a part of it recorded, and what may not change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from opened_logs import json_lines

from stoker.data.ranking.click_log import ClickLog, open_log
from stoker.data.ranking.log_growth import FITTED, fingerprints_of, growth_problem
from stoker.data.ranking.ranking_block import RankingBlock
from stoker.job.blocks.source_block import SourceBlock


def log_of_days(folder: Path, *days: list[int], without: int | None = None) -> ClickLog:
    """A progressive log of a file per day, from the times of its rows.

    Args:
        without: number of the file that lacks the column ``price``.
    """
    for number, times in enumerate(days, 1):
        rows = [{"label": n % 2, "user": n % 3, "price": n / 4, "ts": time} for n, time in enumerate(times)]
        if number == without:
            rows = [{name: value for name, value in row.items() if name != "price"} for row in rows]
        (folder / f"day_{number}.jsonl").write_text(json_lines(rows))
    data = [SourceBlock(path="day_*.jsonl")]
    return open_log(data, RankingBlock(time="ts"), folder, held_out=[], fraction=0.0, progressive=True)


def test_the_first_file_with_earlier_rows_is_named_with_the_end_before_it(tmp_path: Path) -> None:
    """The second file's rows are late; the third's are, behind the first's end, but are later than the second's."""
    before = log_of_days(tmp_path, [*range(1000, 1100)])
    log = log_of_days(tmp_path, [*range(1000, 1100)], [1050, 1060], [1070, 1200])
    problem = growth_problem(before.fingerprints, log)
    assert problem is not None and "day_2.jsonl: rows are earlier" in problem.message
    assert problem.message.endswith("which end at 1099: 2, as row 1 at 1050")


def test_a_recorded_file_may_lack_a_column(tmp_path: Path) -> None:
    days = [*range(1000, 1100)], [*range(1200, 1300)]
    before = log_of_days(tmp_path, days[0])
    log = log_of_days(tmp_path, *days, without=2)
    problem = growth_problem(before.fingerprints, log)
    assert problem is not None and "no column 'price'" in problem.message
    assert growth_problem(log.fingerprints, log) is None


def test_the_unit_of_times_is_no_part_of_a_fingerprint(tmp_path: Path) -> None:
    """Runs of earlier versions recorded none."""
    features = log_of_days(tmp_path, [*range(1000, 1100)]).features
    prints = [fingerprints_of(np.zeros(3), [], replace(features, time_unit=unit)) for unit in (None, 1.0, 1e-3)]
    assert prints[0][FITTED] == prints[1][FITTED] == prints[2][FITTED]
    other = fingerprints_of(np.zeros(3), [], replace(features, time="at"))
    assert other[FITTED] != prints[0][FITTED]
