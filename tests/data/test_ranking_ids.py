"""Ids of values, times and lines of click logs."""

from __future__ import annotations

import hashlib
import time
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from opened_logs import json_lines, kinds, log_of

from stoker.data.ranking import ids
from stoker.data.ranking.ids import IdsOfValues, NoIdError, id_of, pair_ids
from stoker.data.ranking.line_formats import BadLineError, criteo_row, libffm_row, libsvm_row, line_format_of
from stoker.data.ranking.times import date_in_digits, days_of, is_in_unit, seconds_per_unit, time_of


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (17, 17),
        ("17", 17),
        (17.0, 17),
        ("17.0", 17),  # as pandas writes integers of a column with gaps
        ("-3.0", -3),
        ("0.0", 0),
        (-3, -3),
        ("-3", -3),
        (0, 0),
        ("0", 0),
        (" 17 ", 17),
        (True, 1),
        (2**63, -(2**63)),
        (2**64 - 1, -1),
    ],
)
def test_integers_are_their_own_ids(value: object, expected: int) -> None:
    assert id_of(value) == expected == IdsOfValues()[value]


@pytest.mark.parametrize("text", ["017", "+17", "-0", "1.00", "1.5", ".0", "017.0", "1e3", "", "\u0661", "a"])
def test_other_texts_are_63_bits_of_their_digest(text: str) -> None:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    assert id_of(text) == int.from_bytes(digest, "little") % 2**63


def test_spaces_around_a_text_are_not_part_of_it(tmp_path: Path) -> None:
    plain = [{"label": n % 2, "code": f"c{n}", "tags": f"a|b{n % 3}", "group": n % 3 or ""} for n in range(8)]
    lines = "".join(f"{r['label']}, {r['code']} ,{r['tags'].replace('|', ' | ')}, {r['group']}\n" for r in plain)
    spaced = [{**row, "code": f" {row['code']}", "group": f"{row['group']} "} for row in plain]
    logs = [
        log_of(tmp_path, name, text, fraction=0.0, group="group", slices=["code"])
        for name, text in (
            ("plain.jsonl", json_lines(plain)),
            ("spaced.csv", f"label,code,tags,group\n{lines}"),
            ("spaced.jsonl", json_lines(spaced)),
        )
    ]
    assert kinds(logs[0].features) == {"code": "id", "tags": "ids", "group": "dense"}
    first, *others = (log.training for log in logs)
    for other in others:
        assert kinds(other.features) == kinds(first.features)
        for name in ("column0", "column1", "lengths1", "column2", "group", "grouped"):
            np.testing.assert_array_equal(other.store.array(name), first.store.array(name))
        assert other.store.summary.slices == first.store.summary.slices


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, str(2**64), "9" * 500, "9" * 5000, 10**500])
def test_an_integer_of_more_than_64_bits_is_out_of_range(value: object) -> None:
    with pytest.raises(NoIdError, match=r"^id out of range: "):
        id_of(value)


@pytest.mark.parametrize("value", [1.5, [1], None])
def test_fractions_lists_and_nothing_are_no_ids(value: object) -> None:
    with pytest.raises(NoIdError, match=r"^not an id: "):
        id_of(value)


def test_crossed_ids_depend_on_the_order_and_do_not_meet() -> None:
    first, second = (side.reshape(-1) for side in np.meshgrid(np.arange(-50, 250), np.arange(300)))
    ids = pair_ids(first, second)
    assert len(np.unique(ids)) == len(ids) == 90_000
    assert pair_ids(np.array([1]), np.array([2])) != pair_ids(np.array([2]), np.array([1]))


def test_times_are_numbers_or_dates() -> None:
    assert time_of("12.5") == 12.5
    noon = datetime(2020, 1, 2, 12, tzinfo=UTC).timestamp()
    assert time_of("2020-01-02T12:00:00") == time_of("2020-01-02 12:00:00+00:00") == noon
    assert time_of("2020-01-02") == noon - 43_200
    with pytest.raises(ValueError, match="not a time: a number that is not finite"):
        time_of(10**400)
    with pytest.raises(ValueError, match="not a time: 'soon'"):
        time_of("soon")


def test_dates_without_a_zone_are_in_utc_wherever_the_machine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        assert time_of("1970-01-02") == date_in_digits(19700102.0) == 86_400
        assert time_of("1970-01-02T00:00:00+09:00") == 86_400 - 9 * 3600
    finally:
        monkeypatch.undo()
        time.tzset()


def test_times_before_1970_and_far_ahead() -> None:
    assert days_of(np.array([-5.0, 5.0]), 1.0).tolist() == [-1, 0]
    assert is_in_unit(1e11 - 1, 1.0) and not is_in_unit(1e11, 1.0)


def test_few_ids_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ids, "_REMEMBERED", 3)
    remembered = IdsOfValues()
    assert [remembered[number] for number in range(6)] == list(range(6)) and len(remembered) <= 3


@pytest.mark.parametrize("unit", [1, 1e3, 1e6, 1e9])
def test_days_of_times_in_any_unit(unit: float) -> None:
    seconds = np.array([86_400 * 18_000 + 5.0, 86_400 * 18_001 - 5.0, 86_400 * 18_001 + 5.0])
    factor = seconds_per_unit(seconds * unit)
    assert factor is not None
    assert days_of(seconds * unit, factor).tolist() == [18_000, 18_000, 18_001]
    assert [is_in_unit(float(seconds[0] * other), factor) for other in (1, 1e3, 1e6, 1e9)] == [
        other == unit for other in (1, 1e3, 1e6, 1e9)
    ]
    assert not any(is_in_unit(time, factor) for time in (-1e20, 1e21))


@pytest.mark.parametrize("form", ["%Y%m%d", "%Y%m%d%H", "%Y%m%d%H%M", "%Y%m%d%H%M%S"])
def test_dates_in_digits_are_times_in_utc(form: str) -> None:
    there = datetime(2024, 2, 29, *[23, 59, 58][: len(form) // 2 - 3], tzinfo=UTC)
    assert date_in_digits(float(f"{there:{form}}")) == there.timestamp()
    for value in (f"{there:{form}}", int(f"{there:{form}}"), there.isoformat()):
        assert time_of(value, in_digits=True) == there.timestamp()
    for number in (20230229.0, 20240131.5, 20241301.0, 1_700_000_000.0, 14102100.0, 2024.0, -20240131.0, 1e300):
        assert date_in_digits(number) is None
    with pytest.raises(ValueError, match=r"not a time: '0' \(the first rows have dates in digits\)"):
        time_of("0", in_digits=True)


def test_numbers_that_are_no_times_since_1970_have_no_unit() -> None:
    assert seconds_per_unit(np.arange(100.0)) is None


CRITEO_LINE = "\t".join(["1", *(str(n) for n in range(12)), "", *("68fd1e64" for _ in range(26))])


def test_a_line_of_criteo() -> None:
    row = criteo_row(CRITEO_LINE + "\n")
    assert (row["label"], row["I1"], row["I13"], row["C1"], row["C26"]) == ("1", "0", None, "68fd1e64", "68fd1e64")
    assert len(row) == 40
    with pytest.raises(BadLineError, match="wrong number of cells: 39, lines of Criteo have 40"):
        criteo_row(CRITEO_LINE.removeprefix("1\t"))


def test_a_line_of_libsvm() -> None:
    row = libsvm_row("-1 qid:3 2:0.5 17:1 # a comment\n")
    assert row == {"label": "-1", "qid": "3", "features": [[2, 0.5], [17, 1.0]]}
    for bad in ("1 2:x", "1 2:nan", "1 b:1", "1 2"):
        with pytest.raises(BadLineError, match="colon"):
            libsvm_row(bad)


def test_a_line_of_libffm() -> None:
    assert libffm_row("1 0:5:1 2:7:0.5 2:8:1\n") == {"label": "1", "f0": [[5, 1.0]], "f2": [[7, 0.5], [8, 1.0]]}
    with pytest.raises(BadLineError, match="not field:index:value: '0:5'"):
        libffm_row("1 0:5")


def test_formats_are_told_by_a_line() -> None:
    assert line_format_of(CRITEO_LINE) == "criteo"
    assert line_format_of("1 2:0.5 17:1\n") == "libsvm"
    assert line_format_of("0 0:2:0.5 1:17:1\n") == "libffm"
    assert line_format_of("a,b,c") is None
    assert line_format_of("user\titem") is None
