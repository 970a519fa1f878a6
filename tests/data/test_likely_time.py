"""The time column of a click log is found by its values."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from stoker.data.ranking.likely_time import likely_time

SECONDS = [1_700_000_000 + 977 * n for n in range(100)]
DAYS = [datetime(2024, 1, 1, tzinfo=UTC) + timedelta(days=n) for n in range(100)]
SHUFFLED = random.Random(0).sample(range(100), 100)


def found(**columns: list[Any]) -> str | None:
    """The column that is found among some and one of random numbers."""
    columns = {"x": [random.Random(n).random() for n in range(100)], **columns}
    return likely_time(
        list(columns), [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    )


@pytest.mark.parametrize(
    "values",
    [
        SECONDS,
        [str(second) for second in SECONDS],
        [1000 * second for second in SECONDS],
        [second + 0.5 for second in SECONDS],
        [SECONDS[n] for n in SHUFFLED],
        [datetime.fromtimestamp(second, UTC).isoformat() for second in SECONDS],
        [datetime.fromtimestamp(SECONDS[n], UTC).strftime("%Y-%m-%d %H:%M:%S") for n in SHUFFLED],
        [day.date().isoformat() for day in DAYS],
        [day.date().isoformat() for day in reversed(DAYS)],
        [day.strftime("%Y%m%d") for day in DAYS],
        [None, "", *SECONDS[2:]],
    ],
)
def test_times_are_found(values: list[Any]) -> None:
    assert found(seen=values) == "seen"


@pytest.mark.parametrize(
    "columns",
    [
        {"user_id": SECONDS},  # ids that look like seconds
        {"born": [DAYS[n].date().isoformat() for n in SHUFFLED]},
        {"price": list(range(100))},
        {"hash": [random.Random(n).randrange(10**12) for n in range(100)]},
        {"same": [SECONDS[0]] * 100},
        {"text": ["2024", "a", "b", "c"] * 25},
        {"empty": [None] * 100},
        {"first": [SECONDS[0]] * 50 + ["?"] * 50},
    ],
)
def test_other_columns_are_no_times(columns: dict[str, list[Any]]) -> None:
    assert found(**columns) is None


def test_the_column_in_whose_order_the_rows_are_comes_first() -> None:
    assert found(built=[SECONDS[n] for n in SHUFFLED], seen=SECONDS) == "seen"
    assert found(born=[DAYS[n].date().isoformat() for n in SHUFFLED], seen=[SECONDS[n] for n in SHUFFLED]) == "seen"
