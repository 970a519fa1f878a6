"""Click logs of every format: rows, bad rows with their places, the split by time, batches."""

from __future__ import annotations

import csv
import gzip
import json
import re
from dataclasses import replace
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from opened_logs import ROWS, json_lines, kinds, log_of, reasons_of

from stoker.data.ranking import click_log, column_files, encode_columns, fit_features, log_rows
from stoker.data.ranking.click_log import open_log, open_rows
from stoker.data.ranking.encode_columns import items_of
from stoker.data.ranking.encode_rows import BadRowError, encode_rows
from stoker.data.ranking.features import Column, Features
from stoker.data.ranking.find_features import find_features
from stoker.data.ranking.ids import id_of, pair_ids
from stoker.data.ranking.log_gate import log_problems
from stoker.data.ranking.log_warnings import log_warnings
from stoker.data.ranking.ranking_block import FeatureBlock, RankingBlock
from stoker.errors import UserError
from stoker.job.blocks.source_block import SourceBlock


def test_rows_of_json_lines(tmp_path: Path) -> None:
    log = log_of(tmp_path, "log.jsonl", json_lines(ROWS))
    assert kinds(log.features) == {"user_id": "id", "city": "id", "price": "dense", "tags": "ids"}
    assert (log.features.time, log.features.group) == ("ts", "user_id")
    # By time, which falls in this file: the last rows are first, and the first ones are held out.
    assert log.held_out is not None
    assert len(log.training) == 30
    assert len(log.held_out) == 10
    assert log.held_out.places(np.array([9])) == [f"{tmp_path}/log.jsonl:1"]
    batch = log.training.batch(np.array([0, 3]))  # rows 39 and 36
    assert batch.labels.tolist() == [[1.0], [0.0]]
    assert batch.ids["user_id"].ids.tolist() == [4, 1]
    assert batch.ids["city"].ids.tolist() == [id_of("c0")] * 2
    assert batch.ids["tags"].ids.tolist() == [39, id_of("t1"), 36, id_of("t0")]
    assert batch.ids["tags"].lengths.tolist() == [2, 2]
    prices = np.array([row["price"] for row in ROWS[10:]])  # the training part alone decides mean and scale
    expected = (np.array([39 / 4, 36 / 4]) - prices.mean()) / prices.std()
    np.testing.assert_allclose(batch.dense[:, 0], expected, rtol=1e-6)


def test_csv_and_parquet_give_the_ids_of_json_lines(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = [{**row, "tags": "|".join(map(str, row["tags"]))} for row in ROWS]
    with (tmp_path / "log.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(table[0]))
        writer.writeheader()
        writer.writerows(table)
    pq.write_table(pa.Table.from_pylist(table), tmp_path / "log.parquet")
    first = log_of(tmp_path, "log.jsonl", json_lines(ROWS))
    everything = np.arange(30)
    for name in ("log.csv", "log.parquet"):
        other = open_log([SourceBlock(path=name)], RankingBlock(), tmp_path, held_out=[], fraction=0.25)
        assert kinds(other.features) == kinds(first.features)
        for feature, ids in first.training.batch(everything).ids.items():
            found = other.training.batch(everything).ids[feature]
            assert found.ids.tolist() == ids.ids.tolist()
            assert found.lengths.tolist() == ids.lengths.tolist()
        np.testing.assert_allclose(other.training.batch(everything).dense, first.training.batch(everything).dense)


def test_bad_rows_are_counted_with_their_place(tmp_path: Path) -> None:
    bad = [
        "{not json",
        {**ROWS[0], "label": 7},
        {**ROWS[0], "label": None},
        {**ROWS[0], "user_id": 2**70},
        {**ROWS[0], "tags": [1, 2**70]},
        {**ROWS[0], "tags": [[1]]},
        {**ROWS[0], "price": "cheap"},
        {**ROWS[0], "ts": "soon"},
        {**ROWS[0], "ts": "1_0"},
        {**ROWS[0], "price": "1_0"},
        {**ROWS[0], "ts": None},
        {**ROWS[0], "user_id": 0.5},
    ]
    log = log_of(tmp_path, "log.jsonl", json_lines([*ROWS, *bad]))
    assert sorted(reasons_of(log), key=lambda found: found[1]) == [
        ("log.jsonl", 41, "not valid JSON: Expecting property name enclosed in double quotes at column 2"),
        ("log.jsonl", 42, "unknown label: label is '7', and labels are 0 and 1"),
        ("log.jsonl", 43, "no label: label"),
        ("log.jsonl", 44, f"id out of range: {2**70} has more than 64 bits in user_id"),
        ("log.jsonl", 45, f"id out of range: {2**70} has more than 64 bits in tags"),
        ("log.jsonl", 46, "not an id: a value of type list in tags"),
        ("log.jsonl", 47, "not a number: price is 'cheap'"),
        ("log.jsonl", 48, "not a time: 'soon' in ts"),
        ("log.jsonl", 49, "not a time: '1_0' in ts"),
        ("log.jsonl", 50, "not a number: price is '1_0'"),
        ("log.jsonl", 51, "no time: ts"),
        ("log.jsonl", 52, "not an id: the fraction 0.5 in user_id"),
    ]
    summary = log.training.store.summary
    assert (summary.rows_in, summary.rows) == (52, 40)
    (problem,) = log_problems(log, [SourceBlock(path="log.jsonl", max_dropped=0.1)], [])
    assert "12 of 52 rows are dropped, more than max_dropped" in problem.message
    assert "ranking.positive" in problem.suggestion


def test_the_strictest_source_decides_how_many_rows_may_be_dropped(tmp_path: Path) -> None:
    price = [FeatureBlock(name="price", kind="dense")]
    log = log_of(
        tmp_path, "log.jsonl", json_lines([*ROWS[:2], {**ROWS[2], "price": "cheap"}]), fraction=0, features=price
    )
    data = [SourceBlock(path="log.jsonl", max_dropped=share) for share in (1.0, 0.3)]
    (problem,) = log_problems(log, data, [])
    assert problem.suggestion == "mend them, or write `max_dropped: 0.34`" and problem.key == "data[0].max_dropped"
    assert not log_problems(log, data[:1], [])
    assert not log_problems(log, [SourceBlock(path="log.jsonl", max_dropped=0.34)], [])
    exact = log_of(
        tmp_path, "exact.jsonl", json_lines([*ROWS[:3], {**ROWS[2], "price": "cheap"}]), fraction=0, features=price
    )
    assert not log_problems(exact, [SourceBlock(path="exact.jsonl", max_dropped=0.25)], [])


def test_held_out_files_have_their_own_limit_of_dropped_rows(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text(json_lines(ROWS))
    (tmp_path / "later.jsonl").write_text(json_lines([*ROWS[:3], {**ROWS[2], "price": "cheap"}]))
    data, later = ([SourceBlock(path=name, max_dropped=0.2)] for name in ("log.jsonl", "later.jsonl"))
    log = open_log(data, RankingBlock(), tmp_path, held_out=later, fraction=0)
    (problem,) = log_problems(log, data, later)
    assert "1 of 4 rows are dropped" in problem.message and problem.key == "evaluate.data[0].max_dropped"
    assert not log_problems(log, data, [SourceBlock(path="later.jsonl", max_dropped=0.25)])


@pytest.mark.parametrize("label", [0, 1])
def test_a_label_that_is_always_the_same_is_refused(label: int, tmp_path: Path) -> None:
    log = log_of(tmp_path, "log.jsonl", json_lines([{**row, "label": label} for row in ROWS]))
    (problem,) = log_problems(log, [SourceBlock(path="log.jsonl")], [])
    assert problem.message == f"label label is {label} in all 30 training rows, so there is nothing to learn"


@pytest.mark.parametrize(("positive", "reached"), [(4, "below"), (0, "at least")])
def test_labels_on_one_side_of_the_smallest_positive_value_are_refused(
    positive: float, reached: str, tmp_path: Path
) -> None:
    log = log_of(tmp_path, "log.jsonl", json_lines(ROWS), positive=positive)
    (problem,) = log_problems(log, [SourceBlock(path="log.jsonl")], [])
    rows = len(log.training.labels)
    assert problem.message == f"label label is {reached} {positive} in all {rows} training rows"
    assert (problem.key, problem.suggestion) == (
        "ranking.positive",
        "write another `ranking.positive`, or omit it if labels are 0 and 1",
    )
    assert not any("evaluate.fraction" in warning for warning in log_warnings(log, []))


def test_no_row_that_is_left_to_train_on_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no row is left to train on") as error:
        log_of(tmp_path, "log.jsonl", json_lines(ROWS), fraction=1.0)
    assert error.value.problems[0].key == "evaluate.fraction"


def test_further_values_of_a_slice_are_one_and_few_dropped_rows_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode_columns, "SLICES", 2)
    monkeypatch.setattr(column_files, "PLACES", 2)
    bad = [{**ROWS[0], "label": 7}] * 3
    log = log_of(tmp_path, "log.jsonl", json_lines([*ROWS, *bad]), fraction=0, slices=["user_id"])
    assert log.training.store.summary.slices == (("0", "1", "(others)"),)
    assert log.training.column("slice0").tolist() == [min(row["user_id"], 2) for row in reversed(ROWS)]
    assert [row for _, row, _ in reasons_of(log)] == [41, 42] and log.training.store.summary.reasons == {
        "unknown label": 3
    }


def test_a_number_far_beyond_those_of_the_training_rows_is_limited(tmp_path: Path) -> None:
    features = log_of(tmp_path, "log.jsonl", json_lines(ROWS)).features
    batch, _ = encode_rows([{"price": 1e38}, {"price": -1e38}], features)
    assert batch.dense.tolist() == [[1e6], [-1e6]]


def test_lines_that_cannot_be_read_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_rows, "LONGEST_LINE", 50)
    lines = [f"{n % 2} {n}:0.5".encode() for n in range(20)]
    bad = [b"1 3:0.5 # caf\xe9", b"1 4:0.5 #" + b"x" * 50]
    (tmp_path / "log.svm").write_bytes(b"\n".join([*lines, *bad]) + b"\n")
    log = open_log([SourceBlock(path="log.svm")], RankingBlock(), tmp_path, held_out=[], fraction=0)
    assert reasons_of(log) == [("log.svm", 21, "not valid UTF-8"), ("log.svm", 22, "longer than 64 MiB")]
    packed = gzip.compress(b"\n".join(lines * 500))
    (tmp_path / "cut.svm.gz").write_bytes(packed[: len(packed) // 2])
    cut = open_log([SourceBlock(path="cut.svm.gz")], RankingBlock(), tmp_path, held_out=[], fraction=0)
    [(_, row, reason)] = reasons_of(cut)
    assert row == len(cut.training) + 1 and reason.startswith("damaged")


def test_a_single_file_may_not_lose_more_than_max_dropped(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    log_of(tmp_path, "log/day_1.jsonl", json_lines(ROWS))
    (tmp_path / "log/day_2.jsonl").write_text(json_lines([{**ROWS[0], "price": "cheap"}, *ROWS[:3]]))
    data = [SourceBlock(path="log")]
    log = open_log(data, RankingBlock(), tmp_path, held_out=[], fraction=0)
    assert not log_problems(log, data, [])
    (problem,) = log_problems(log, data, [], each_file=True)
    assert problem.message.endswith("day_2.jsonl: 1 of 4 rows are dropped, more than max_dropped: not a number (1)")
    assert not log_problems(log, [SourceBlock(path="log", max_dropped=0.25)], [], each_file=True)


@pytest.mark.parametrize(("change", "said"), [
    ({"user_id": 1.2345678901234568e18}, r"the ids of user_id are floats such as 1.2345678901234568e\+18, whose last"),
    ({"seen": "[12, 3]"}, r"the values of seen are texts such as '\[12, 3\]', and not lists"),
])  # fmt: skip
def test_a_later_file_whose_cells_lost_their_form_is_refused(
    change: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(click_log, "SAMPLE", 30)
    first = [{**row, "seen": None} for row in ROWS]  # as no user has a history yet
    (tmp_path / "day_1.jsonl").write_text(json_lines(first))
    (tmp_path / "day_2.jsonl").write_text(json_lines([*first[:10], {**first[0], **change}]))
    data = [SourceBlock(path="day_*.jsonl")]
    block = RankingBlock(features=[FeatureBlock(name="seen", kind="ids")])
    log = open_log(data, block, tmp_path, held_out=[], fraction=0)
    (problem,) = log_problems(log, data, [], each_file=True)
    assert re.search(rf"day_2\.jsonl: {said}", problem.message) and problem.key == "data[0].path"
    (tmp_path / "day_3.jsonl").write_text((tmp_path / "day_2.jsonl").read_text())
    later = open_log(data, block, tmp_path, held_out=[], fraction=0)
    assert log_problems(later, data, [], each_file=True) == [problem]  # of the first such file
    (tmp_path / "day_3.jsonl").unlink()
    again = open_log(data, block, tmp_path, held_out=[], fraction=0)  # from the cache
    assert log_problems(again, data, [], each_file=True) == [problem]
    assert not log_problems(log, data, [])  # of a run that has trained
    one_id = RankingBlock(features=[FeatureBlock(name="seen", kind="id"), FeatureBlock(name="user_id", kind="dense")])
    assert not log_problems(open_log(data, one_id, tmp_path, held_out=[], fraction=0), data, [], each_file=True)


def test_a_file_that_lacks_a_column_is_warned_of(tmp_path: Path) -> None:
    for day, names in ((1, ("label", "user_id", "price", "city")), (2, ("label", "user_id")), (3, ("label", "price"))):
        lines = "".join(",".join(str(row[name]) for name in names) + "\n" for row in ROWS[: 10 * day])
        (tmp_path / f"day_{day}.csv").write_text(f"{','.join(names)}\n{lines}")
    log = open_log([SourceBlock(path="day_*.csv")], RankingBlock(), tmp_path, held_out=[], fraction=0)
    assert log_warnings(log, []) == [
        "column city is not in 2 files, such as day_2.csv: 50 rows have no value of it",
        "column price is not in day_2.csv: 20 rows have no value of it",
        "column user_id is not in day_3.csv: 30 rows have no value of it",
    ]


def test_a_damaged_file_is_refused_however_few_rows_are_read_as_bad(tmp_path: Path) -> None:
    packed = gzip.compress(json_lines(ROWS * 50).encode())
    (tmp_path / "log.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    block = SourceBlock(path="log.jsonl.gz")
    log = open_log([block], RankingBlock(), tmp_path, held_out=[], fraction=0.25)
    assert 100 < log.training.store.summary.rows < 1900
    [problem] = log_problems(log, [block], [], each_file=True)
    assert "log.jsonl.gz:" in problem.message
    assert "damaged archive" in problem.message
    assert problem.key == "data[0].max_dropped"
    assert not log_problems(log, [SourceBlock(path="log.jsonl.gz", max_dropped=1.0)], [], each_file=True)


def test_numbers_and_weights_beyond_float32_are_bad(tmp_path: Path) -> None:
    rows = [{"label": n % 2, "user_id": n, "price": n / 4, "tags": {"a": 0.5}, "weight": 1.0} for n in range(40)]
    bad = [
        {**rows[0], "price": 1e39},
        {**rows[0], "price": -1e39},
        {**rows[0], "tags": {"a": 1e39}},
        {**rows[0], "weight": 1e39},
        {**rows[0], "weight": -0.5},
    ]
    largest = {**rows[0], "price": float(np.finfo(np.float32).max)}
    log = log_of(tmp_path, "log.jsonl", json_lines([*rows, *bad, largest]), weight="weight", fraction=0.0)
    assert sorted(reasons_of(log), key=lambda found: found[1]) == [
        ("log.jsonl", 41, "number out of range: price is '1e+39', beyond float32"),
        ("log.jsonl", 42, "number out of range: price is '-1e+39', beyond float32"),
        ("log.jsonl", 43, "not an id with its weight: ('a', 1e+39) in tags"),
        ("log.jsonl", 44, "not a weight: weight is '1e+39'"),
        ("log.jsonl", 45, "not a weight: weight is '-0.5'"),
    ]
    batch = log.training.batch(np.arange(41))
    assert np.isfinite(batch.dense).all()
    assert np.isfinite(batch.weights).all()


CRITEO = ["\t".join([str(n % 2), *["3"] * 13, *[f"c{n % 4}"] * 26]) for n in range(20)]


@pytest.mark.parametrize(
    ("name", "lines", "bad", "reason", "expected"),
    [
        (
            "train.txt",
            CRITEO,
            CRITEO[0][2:],
            "wrong number of cells: 39, lines of Criteo have 40",
            {**{f"I{n}": "dense" for n in range(1, 14)}, **{f"C{n}": "id" for n in range(1, 27)}},
        ),
        (
            "train.svm",
            [f"{1 if n % 2 else -1} {n}:0.5 {n + 1}:2" for n in range(20)],
            "1 5:x",
            "not a number behind the colon: '5:x'",
            {"features": "ids"},
        ),
        (
            "train.ffm",
            [f"{n % 2} 0:{n}:1 1:{n + 1}:0.25" for n in range(20)],
            "1 0:5",
            "not field:index:value: '0:5'",
            {"f0": "ids", "f1": "ids"},
        ),
    ],
)  # fmt: skip
def test_formats_without_a_header(
    tmp_path: Path, name: str, lines: list[str], bad: str, reason: str, expected: dict[str, str]
) -> None:
    log = log_of(tmp_path, name, "\n".join([*lines, bad]) + "\n")
    assert kinds(log.features) == expected
    assert reasons_of(log) == [(name, 21, reason)]
    assert log.training.labels[:, 0].tolist() == [n % 2 for n in range(15)]
    batch = log.training.batch(np.array([2]))
    if name == "train.svm":
        assert batch.ids["features"].ids.tolist() == [2, 3]
        assert batch.ids["features"].weights is not None
        assert batch.ids["features"].weights.tolist() == [0.5, 2.0]
    elif name == "train.ffm":
        assert batch.ids["f1"].ids.tolist() == [3]
        assert batch.ids["f1"].weights is not None
        assert batch.ids["f1"].weights.tolist() == [0.25]
    else:
        assert batch.ids["C26"].ids.tolist() == [id_of("c2")]
        assert batch.dense.tolist() == [[0.0] * 13]  # a number that is always the same says nothing


def test_a_named_format_needs_no_suffix_and_days_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    days = tmp_path / "1\u00b21" / "days"  # a digit that is no decimal number
    days.mkdir(parents=True)
    for day in (1, 2, 10):
        (days / f"day_{day}").write_text("\n".join(CRITEO[:4]) + "\n")
    log = open_log([SourceBlock(path="days", format="criteo")], RankingBlock(), days.parent, held_out=[], fraction=0.25)
    assert [place.rpartition("/")[2] for place in log.training.places(np.array([0, 4, 8]))] == [
        "day_1:1",
        "day_2:1",
        "day_10:1",
    ]
    assert log.training.periods().tolist() == [0] * 4 + [1] * 4 + [2]
    with pytest.raises(UserError, match=r"no data file among 3 files: days; .* needs `format: criteo`, libsvm or"):
        open_log([SourceBlock(path="days")], RankingBlock(), days.parent, held_out=[], fraction=0.0)


def test_days_of_a_log_whose_dates_are_digits(tmp_path: Path) -> None:
    times = [datetime(2024, 2, 27, tzinfo=UTC) + timedelta(hours=3 * n) for n in range(40)]
    rows = [{**row, "ts": int(f"{at:%Y%m%d%H%M%S}")} for row, at in zip(ROWS, times, strict=True)]
    log = log_of(tmp_path, "log.jsonl", json_lines([*rows, {**ROWS[0], "ts": 0}]), fraction=0.0)
    first = int(times[0].timestamp()) // 86_400
    assert log.training.periods().tolist() == [first + n // 8 for n in range(40)]
    assert [reason for *_, reason in reasons_of(log)] == ["not a time: '0' (the first rows have dates in digits) in ts"]
    assert Features.from_json(log.features.as_json()) == log.features


def test_labels_may_be_ratings_and_several(tmp_path: Path) -> None:
    rows = [{"stars": n % 5 + 1, "bought": n % 3, "user": f"u{n}"} for n in range(20)]
    log = log_of(tmp_path, "log.jsonl", json_lines(rows), label=["stars", "bought"], positive=2.0)
    assert log.training.labels[:6].tolist() == [[0, 0], [1, 0], [1, 1], [1, 0], [1, 0], [0, 1]]
    with pytest.raises(UserError, match=r"all 1 rows are dropped: unknown label \(1\).*ranking.positive: 4"):
        log_of(tmp_path, "other.jsonl", '{"label": 5, "a": "b"}\n')


def test_rows_of_another_file_are_read_by_the_features_of_a_run(tmp_path: Path) -> None:
    log = log_of(tmp_path, "log.jsonl", json_lines(ROWS))
    features = Features.from_json(json.loads(json.dumps(log.features.as_json())))
    assert features == log.features
    rows = open_rows([SourceBlock(path="log.jsonl")], features, tmp_path)
    at = np.arange(30)
    np.testing.assert_array_equal(rows.batch(at).dense, log.training.batch(at).dense)


def test_rows_to_measure_a_model_on_need_no_weight(tmp_path: Path) -> None:
    weighted = [{**row, "w": 2.0} for row in ROWS]
    log = log_of(tmp_path, "log.jsonl", json_lines(weighted), weight="w")
    assert log.training.batch(np.arange(2)).weights.tolist() == [2.0, 2.0]
    for each, weights in (
        (ROWS, [1.0] * 40),
        ([{**row, "w": 3.0} for row in ROWS] + [{**ROWS[0], "w": "x"}], [3.0] * 40),
    ):
        (tmp_path / "later.jsonl").write_text(json_lines(each))
        rows = open_rows([SourceBlock(path="later.jsonl")], log.features, tmp_path)
        assert rows.batch(np.arange(len(rows))).weights.tolist() == weights
        assert rows.store.summary.unknown == {}


def test_rows_to_measure_a_model_on_need_no_time(tmp_path: Path) -> None:
    features = log_of(tmp_path, "log.jsonl", json_lines(ROWS)).features
    assert features.time == "ts"
    later = [{name: value for name, value in row.items() if name != "ts"} for row in ROWS]
    (tmp_path / "later.jsonl").write_text(json_lines(later))
    rows = open_rows([SourceBlock(path="later.jsonl")], features, tmp_path)
    assert rows.places(np.arange(40)) == [f"{tmp_path}/later.jsonl:{row}" for row in range(1, 41)]
    (tmp_path / "later.jsonl").write_text(json_lines([*later, ROWS[0]]))  # a row has one, so the others lack it
    rows = open_rows([SourceBlock(path="later.jsonl")], features, tmp_path)
    assert (len(rows), rows.store.summary.reasons) == (1, {"no time": 40})


@pytest.mark.parametrize("value", [[0.5, 1.25], {"a": [1]}, {"a": "b"}])
def test_a_column_that_fits_no_feature_may_be_ignored(value: Any, tmp_path: Path) -> None:
    rows = [{**row, "emb": value} for row in ROWS]
    with pytest.raises(UserError, match=r"all 40 rows are dropped: not an id.* in emb; add emb to `ranking.ignore`"):
        log_of(tmp_path, "log.jsonl", json_lines(rows))
    assert "emb" not in kinds(log_of(tmp_path, "log.jsonl", json_lines(rows), ignore=["emb"]).features)
    some = log_of(tmp_path, "some.jsonl", json_lines([*ROWS, *rows]))
    (problem,) = log_problems(some, [SourceBlock(path="some.jsonl", max_dropped=0.1)], [])
    assert problem.suggestion == "add emb to `ranking.ignore`"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"^zero.csv is empty; give a source that holds at least one row$"),
        ("label,user_id,city,price,tags,ts\n", r"^there are no rows in zero.csv$"),
    ],
)
def test_a_file_without_rows_is_named(text: str, message: str, tmp_path: Path) -> None:
    log = log_of(tmp_path, "log.jsonl", json_lines(ROWS))
    with pytest.raises(UserError, match=message):
        log_of(tmp_path, "zero.csv", text)
    with pytest.raises(UserError, match=message):
        open_rows([SourceBlock(path="zero.csv")], log.features, tmp_path)


def test_rows_without_a_column_of_the_model_are_refused_by_its_name(tmp_path: Path) -> None:
    """They would be measured without that feature, and only the figures would show it."""
    features = log_of(tmp_path, "log.jsonl", json_lines(ROWS)).features
    renamed = [{("User_Id" if key == "user_id" else key): row[key] for key in row if key != "city"} for row in ROWS]
    (tmp_path / "other.jsonl").write_text(json_lines(renamed))
    other = SourceBlock(path="other.jsonl")
    with pytest.raises(UserError) as error:
        open_rows([other], features, tmp_path)
    assert "no column 'user_id', which the model was trained on; did you mean User_Id?" in str(error.value)
    assert "no column 'city', which the model was trained on; add it; leave it empty if" in str(error.value)
    (tmp_path / "unlabelled.jsonl").write_text(json_lines([{**row, "label": 1, "clicked": 1} for row in ROWS]))
    with pytest.raises(UserError, match="no column 'click', which the model was trained on; did you mean clicked"):
        open_rows([SourceBlock(path="unlabelled.jsonl")], replace(features, labels=("click",)), tmp_path)
    with pytest.raises(UserError, match="no column 'rating', which the model was trained on; add the label of each"):
        open_rows([SourceBlock(path="log.jsonl")], replace(features, labels=("rating",)), tmp_path)
    with pytest.raises(UserError, match="no column 'city'"):
        data = [SourceBlock(path="log.jsonl")]
        open_log(data, RankingBlock(), tmp_path, held_out=[other], fraction=0)
    (tmp_path / "other.jsonl").write_text(json_lines([{**row, "city": None} for row in ROWS]))
    assert len(open_rows([other], features, tmp_path)) == 40


def test_rows_of_libffm_have_the_fields_that_occur_in_them(tmp_path: Path) -> None:
    features = log_of(tmp_path, "log.ffm", "1 0:1:1 1:2:1\n0 0:3:1 1:4:1\n" * 4).features
    (tmp_path / "other.ffm").write_text("1 0:1:1\n")
    assert len(open_rows([SourceBlock(path="other.ffm")], features, tmp_path)) == 1


@pytest.mark.parametrize("beside", ["2.5", "no number"])
def test_a_number_that_is_written_as_nan_is_missing_whatever_rows_are_beside_it(beside: str, tmp_path: Path) -> None:
    further = [{**ROWS[0], "price": "NaN"}, {**ROWS[1], "price": beside}]
    log = log_of(tmp_path, "log.jsonl", json_lines([*ROWS, *further]), fraction=0)
    assert [reason for *_, reason in reasons_of(log)] == ["not a number: price is 'no number'"] * (beside[0] == "n")
    assert len(log.training) == 42 - len(reasons_of(log))


def test_ids_with_weights_in_some_rows_alone(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"label": n % 2, "tags": {"a": 0.5}} for n in range(40)]
    rows[20]["tags"] = ["a", "b"]
    log = log_of(tmp_path, "log.jsonl", json_lines(rows), fraction=0)
    found = log.training.batch(np.array([19, 20])).ids["tags"].weights
    assert found is not None and found.tolist() == [0.5, 1.0, 1.0]
    features = find_features([{"label": 0, "tags": ["a", "b"]}], RankingBlock())
    with pytest.raises(BadRowError, match="weights of ids: tags had none when the features were detected"):
        encode_rows([{"tags": {"a": 0.5}}], features)


def test_decimals_of_parquet_are_numbers_and_times_of_day_are_to_be_cast(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"label": n % 2, "user_id": Decimal(n), "price": Decimal(n) / 4} for n in range(12)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "log.parquet")
    data = [SourceBlock(path="log.parquet")]
    log = open_log(data, RankingBlock(), tmp_path, held_out=[], fraction=0.0)
    assert kinds(log.features) == {"user_id": "id", "price": "dense"}
    assert log.training.batch(np.arange(12)).ids["user_id"].ids.tolist() == list(range(12))
    assert log.training.store.array("column1").tolist() == [n / 4 for n in range(12)]
    for value in (time(1, 2), timedelta(seconds=3)):
        pq.write_table(pa.Table.from_pylist([{**row, "at": value} for row in rows]), tmp_path / "log.parquet")
        with pytest.raises(UserError, match=f"of type {type(value).__name__} in at; cast at to numbers or texts"):
            open_log(data, RankingBlock(), tmp_path, held_out=[], fraction=0.0)


def test_parquet_with_dates_timestamps_and_bytes_is_read_as_json_is(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    days = [date(2020, 1, 1 + n % 3) for n in range(12)]
    rows = [
        {
            "label": n % 2,
            "day": day,
            "made": datetime(2020, 2, 1, n),
            "item": f"i{n}".encode(),
            "tags": [b"a", b"\xff"],
            "born": days[-n],
        }
        for n, day in enumerate(days)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "log.parquet")
    log = open_log([SourceBlock(path="log.parquet")], RankingBlock(time="day"), tmp_path, held_out=[], fraction=0.0)
    assert log.training.store.summary.rows == 12
    midnight = datetime(2020, 1, 1, tzinfo=UTC).timestamp()
    assert log.training.column("time").tolist() == [midnight + 86_400 * (n // 4) for n in range(12)]
    ids = log.training.batch(np.array([0, 1])).ids
    assert ids["item"].ids.tolist() == [id_of("i0"), id_of("i3")]
    assert ids["made"].ids.tolist() == [id_of("2020-02-01T00:00:00"), id_of("2020-02-01T03:00:00")]
    assert ids["born"].ids.tolist() == [id_of("2020-01-01"), id_of("2020-01-01")]
    assert ids["tags"].ids.tolist() == [id_of("a"), id_of("\\xff")] * 2


def test_rows_that_are_all_dropped_name_the_first_reason(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rows can be read; .*log.csv:2: wrong number of cells: 2, the header has 1"):
        log_of(tmp_path, "log.csv", "# comment\nlabel,a\n1,2\n0,3\n")
    rows = [{"label": n % 2, "x": f"t{n}"} for n in range(4)]
    with pytest.raises(UserError, match="write `kind: id`") as error:
        log_of(tmp_path, "log.jsonl", json_lines(rows), features=[FeatureBlock(name="x", kind="dense")])
    assert error.value.problems[0].key == "ranking.features[0].kind"


def test_integers_of_400_digits_are_bad_cells(tmp_path: Path) -> None:
    rows = [{"label": n % 2, "x": n / 2, "user": f"u{n}", "ts": n} for n in range(40)]
    bad = [{**rows[0], "ts": 10**400}, {**rows[0], "x": 10**400}]
    stated = [FeatureBlock(name="x", kind="dense")]
    log = log_of(tmp_path, "log.jsonl", json_lines([*rows, *bad]), features=stated, fraction=0.0)
    assert [(row, reason.partition(":")[0]) for _, row, reason in reasons_of(log)] == [
        (41, "not a time"),
        (42, "not a number"),
    ]


def test_rows_of_one_time_stay_in_the_order_of_the_file(tmp_path: Path) -> None:
    rows = [{**row, "ts": n % 2} for n, row in enumerate(ROWS * 5)]
    log = log_of(tmp_path, "log.jsonl", json_lines(rows), fraction=0)
    assert log.training.rows.tolist() == [*range(0, 200, 2), *range(1, 200, 2)]


def test_held_out_files_leave_all_rows_to_training_and_are_scaled_as_these(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text(json_lines(ROWS))
    (tmp_path / "later.jsonl").write_text(json_lines([{**row, "price": 100.0} for row in ROWS[:8]]))
    data, later = ([SourceBlock(path=name)] for name in ("log.jsonl", "later.jsonl"))
    log = open_log(data, RankingBlock(), tmp_path, held_out=later, fraction=0.25)
    assert log.held_out is not None and (len(log.training), len(log.held_out)) == (40, 8)
    prices = np.array([row["price"] for row in ROWS])
    expected = (100 - prices.mean()) / prices.std()
    np.testing.assert_allclose(log.held_out.batch(np.arange(8)).dense[:, 0], expected, rtol=1e-6)


DAY = 86_400


def test_numbers_of_a_progressive_log_are_fitted_to_the_first_day(tmp_path: Path) -> None:
    rows = [{**row, "price": n, "ts": 18_000 * DAY + n * DAY // 10} for n, row in enumerate(ROWS)]
    (tmp_path / "log.jsonl").write_text(json_lines(rows))
    for fraction, fitted in ((0.0, 10), (0.5, 10), (0.9, 4)):
        data, block = [SourceBlock(path="log.jsonl")], RankingBlock(progressive=True)
        log = open_log(data, block, tmp_path, held_out=[], fraction=fraction, progressive=True)
        assert log.features["price"].mean == pytest.approx(np.arange(fitted).mean())
        assert log.training.first_rows().tolist() == list(range(0, len(log.training), 10))


def test_periods_and_parts_of_rows(tmp_path: Path) -> None:
    plain = [{name: value for name, value in row.items() if name != "ts"} for row in ROWS]
    log = log_of(tmp_path, "log.jsonl", json_lines(plain[:25]), fraction=0)
    assert log.training.periods().tolist() == [n * 10 // 25 for n in range(25)]
    part = log.training.part(3, 7)
    assert part.rows.tolist() == [3, 4, 5, 6]
    first, there = part.first_ids("tags")
    assert first.tolist() == [3, 4, 5, 6] and there.all()
    for name, first_row in (("day_1.jsonl", 0), ("day_2.jsonl", 12)):
        rows = [{**ROWS[n], "ts": 18_000 * DAY + n * DAY // 10} for n in range(first_row, first_row + 12)]
        (tmp_path / name).write_text(json_lines(rows))
    two = open_log([SourceBlock(path="day_*.jsonl")], RankingBlock(), tmp_path, held_out=[], fraction=0)
    assert two.training.first_rows().tolist() == [0, 10, 12, 20]  # a day, a file and a day begin after the first


def test_rows_to_measure_a_model_on_without_a_time_keep_their_weights(tmp_path: Path) -> None:
    features = log_of(tmp_path, "log.jsonl", json_lines([{**row, "w": 2.0} for row in ROWS]), weight="w").features
    later = [{**row, "w": n} for n, row in enumerate(ROWS)]
    (tmp_path / "later.jsonl").write_text(json_lines([{k: v for k, v in row.items() if k != "ts"} for row in later]))
    rows = open_rows([SourceBlock(path="later.jsonl")], features, tmp_path)
    assert rows.batch(np.array([7, 3])).weights.tolist() == [7.0, 3.0]


def test_files_of_libffm_may_lack_fields(tmp_path: Path) -> None:
    (tmp_path / "day_1.ffm").write_text("1 0:1:1 1:2:1\n0 0:3:1 1:4:1\n" * 10)
    (tmp_path / "day_2.ffm").write_text("1 0:1:1\n0 0:3:1\n" * 10)
    log = open_log([SourceBlock(path="day_*.ffm")], RankingBlock(), tmp_path, held_out=[], fraction=0)
    assert len(log.training) == 40 and log_warnings(log, []) == []


def test_numbers_are_fitted_to_evenly_spaced_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit_features, "ROWS", 10)
    rows = [{"label": n % 2, "price": n, "debt": -n, "age": n} for n in range(40)]
    features = [
        FeatureBlock(name="price", kind="dense", log=False),
        FeatureBlock(name="debt", kind="dense", log=True),
        FeatureBlock(name="age", buckets=4),
    ]
    log = log_of(tmp_path, "log.jsonl", json_lines(rows), fraction=0, features=features)
    spaced = np.arange(0, 40, 4)
    logarithms = -np.log1p(spaced)
    assert log.features["price"].mean == pytest.approx(spaced.mean())
    assert (log.features["debt"].mean, log.features["debt"].scale) == pytest.approx(
        (logarithms.mean(), logarithms.std())
    )
    assert log.features["age"].boundaries == tuple(np.quantile(spaced, [0.25, 0.5, 0.75]))
    found = log.training.batch(np.array([5])).dense[0]
    assert found[1] == pytest.approx((-np.log1p(5) - logarithms.mean()) / logarithms.std())


@pytest.mark.parametrize("log", [False, True])
def test_a_number_that_is_always_the_same_has_a_scale_of_1(log: bool, tmp_path: Path) -> None:
    """A mean of equal logarithms may be rounded, and their deviation of 1e-16 would make any other number huge."""
    rows = [{"label": n % 2, "price": 7 if n < 37 else 8, "user_id": n} for n in range(40)]
    features = [FeatureBlock(name="price", kind="dense", log=log)]
    found = log_of(tmp_path, "log.jsonl", json_lines(rows), fraction=3 / 40, features=features)
    assert found.features["price"].scale == 1 and found.held_out is not None
    expected = np.log1p(8) - np.log1p(7) if log else 1
    assert found.held_out.batch(np.arange(3)).dense[:, 0] == pytest.approx(expected, rel=1e-5)
    assert found.training.batch(np.arange(37)).dense[:, 0] == pytest.approx(0, abs=1e-6)


def test_a_cross_pairs_every_id_of_one_feature_with_every_one_of_the_other(tmp_path: Path) -> None:
    rows = [{"label": n % 2, "tags": [n, n + 1][: n % 3], "sizes": [10, 20, 30][: n % 4 + 1]} for n in range(40)]
    log = log_of(tmp_path, "log.jsonl", json_lines(rows), fraction=0, crosses=[["tags", "sizes"]])
    found = log.training.batch(np.array([2, 3, 5])).ids["tags x sizes"]
    first, second = np.array([2, 2, 2, 3, 3, 3, 5, 5, 6, 6]), np.array([10, 20, 30, 10, 20, 30, 10, 20, 10, 20])
    assert found.lengths.tolist() == [6, 0, 4] and found.ids.tolist() == pair_ids(first, second).tolist()


def test_items_of_a_cell() -> None:
    weighted = Column("tags", "ids", separator="|", weighted=True)
    assert items_of("a:b:0.5||c", weighted) == [("a:b", 0.5), ("c", 1.0)]
    assert items_of(["a", " ", "", None, "b"], Column("tags", "ids")) == [("a", 1.0), ("b", 1.0)]


def test_a_conversion_without_a_click_is_dropped_wherever_it_is(tmp_path: Path) -> None:
    rows = [{"clicked": n % 2, "bought": n % 4 == 3, "user_id": n} for n in range(40)]
    rows[0]["bought"] = rows[6]["bought"] = True
    labels = ["clicked", "bought"]
    log = log_of(tmp_path, "log.jsonl", json_lines(rows), fraction=0, label=labels, model="esmm")
    said = "conversion without a click: bought is positive and clicked is not"
    assert reasons_of(log) == [("log.jsonl", 1, said), ("log.jsonl", 7, said)]
