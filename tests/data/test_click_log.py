"""Click logs of every format: rows, features found, bad rows with their places, the split by time, batches."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, date, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from stoker.data.ranking import log_audit
from stoker.data.ranking.click_log import ClickLog, open_log, open_rows
from stoker.data.ranking.encode_rows import BadRowError, encode_rows
from stoker.data.ranking.features import Features
from stoker.data.ranking.find_features import find_features
from stoker.data.ranking.ids import id_of, pair_ids
from stoker.data.ranking.log_audit import audit_log
from stoker.data.ranking.log_gate import log_problems
from stoker.data.ranking.ranking_block import AdmissionBlock, FeatureBlock, RankingBlock
from stoker.errors import UserError
from stoker.job.blocks.source_block import SourceBlock

ROWS: list[dict[str, Any]] = [
    {"label": n % 2, "user_id": n % 5, "city": f"c{n % 3}", "price": n / 4, "tags": [n, f"t{n % 2}"], "ts": 1000 - n}
    for n in range(40)
]


def log_of(
    folder: Path, name: str, text: str, *, form: str = "auto", fraction: float = 0.25, **settings: Any
) -> ClickLog:
    (folder / name).write_text(text, encoding="utf-8")
    block = SourceBlock(path=name, format=form)  # type: ignore[arg-type]
    return open_log([block], RankingBlock(**settings), folder, held_out=[], fraction=fraction)


def json_lines(rows: Sequence[Any]) -> str:
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


def kinds(features: Features) -> dict[str, str]:
    return {column.name: column.kind for column in features}


def reasons_of(log: ClickLog) -> list[tuple[str, int, str]]:
    return [(Path(row.source).name, row.row, row.reason) for row in log.training.store.summary.rejected]


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
        ("log.jsonl", 49, "no time: ts"),
        ("log.jsonl", 50, "not an id: the fraction 0.5 in user_id"),
    ]
    summary = log.training.store.summary
    assert (summary.rows_in, summary.rows) == (50, 40)
    (problem,) = log_problems(log, [SourceBlock(path="log.jsonl", max_dropped=0.1)], [])
    assert "10 of 50 rows are dropped, more than max_dropped" in problem.message
    assert "ranking.positive" in problem.suggestion


def test_numbers_and_weights_beyond_float32_are_bad(tmp_path: Path) -> None:
    rows = [{"label": n % 2, "user_id": n, "price": n / 4, "tags": {"a": 0.5}, "weight": 1.0} for n in range(40)]
    bad = [
        {**rows[0], "price": 1e39},
        {**rows[0], "price": -1e39},
        {**rows[0], "tags": {"a": 1e39}},
        {**rows[0], "weight": 1e39},
    ]
    largest = {**rows[0], "price": float(np.finfo(np.float32).max)}
    log = log_of(tmp_path, "log.jsonl", json_lines([*rows, *bad, largest]), weight="weight", fraction=0.0)
    assert sorted(reasons_of(log), key=lambda found: found[1]) == [
        ("log.jsonl", 41, "number out of range: price is '1e+39', beyond float32"),
        ("log.jsonl", 42, "number out of range: price is '-1e+39', beyond float32"),
        ("log.jsonl", 43, "not an id with its weight: ('a', 1e+39) in tags"),
        ("log.jsonl", 44, "not a weight: weight is '1e+39'"),
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
    days = tmp_path / "days"
    days.mkdir()
    for day in (1, 2, 10):
        (days / f"day_{day}").write_text("\n".join(CRITEO[:4]) + "\n")
    log = open_log([SourceBlock(path="days", format="criteo")], RankingBlock(), tmp_path, held_out=[], fraction=0.25)
    assert [place.rpartition("/")[2] for place in log.training.places(np.array([0, 4, 8]))] == [
        "day_1:1",
        "day_2:1",
        "day_10:1",
    ]
    assert log.training.periods().tolist() == [0] * 4 + [1] * 4 + [2]
    with pytest.raises(UserError, match="no data file among 3 files"):
        open_log([SourceBlock(path="days")], RankingBlock(), tmp_path, held_out=[], fraction=0.0)


def test_features_are_found_by_stated_rules() -> None:
    row = {
        "label": 1, "weight": 0.5, "zip": "01234", "itemId": 3, "age": 30, "big": 2**40, "flag": True, "empty": None,
        "counts": {"a": 0.5}, "item_history": [1, 2], "item_id": 4, "liked_by": [["u", 0.5]], "text": "a|b",
    }  # fmt: skip
    features = find_features([row, {**row, "age": 31}], RankingBlock(weight="weight"))
    assert kinds(features) == {
        "zip": "id", "itemId": "id", "age": "dense", "big": "id", "flag": "dense", "empty": "id", "counts": "ids",
        "item_history": "sequence", "item_id": "id", "liked_by": "ids", "text": "ids",
    }  # fmt: skip
    assert features["item_history"].table == "item_id"
    assert features["counts"].weighted
    assert features["liked_by"].weighted


def test_a_column_that_is_not_there_is_named_with_the_nearest() -> None:
    with pytest.raises(UserError, match="the rows have no column 'labl'; did you mean label") as found:
        find_features([{"label": 1, "a": 2}], RankingBlock(label="labl", crosses=[["a"]]))
    assert [problem.key for problem in found.value.problems] == ["ranking.label", "ranking.crosses[0]"]


def test_stated_features_crosses_buckets_and_sequences(tmp_path: Path) -> None:
    rows = [{"label": n % 2, "a": n % 3, "b": f"b{n % 2}", "x": n, "seen": f"{n},{n + 1},{n + 2}"} for n in range(20)]
    stated = [
        FeatureBlock(name="a", kind="id"),
        FeatureBlock(name="x", kind="buckets", boundaries=[5.0, 10.0]),
        FeatureBlock(name="seen", kind="sequence", separator=",", longest=2, table="a"),
    ]
    log = log_of(tmp_path, "log.jsonl", json_lines(rows), features=stated, crosses=[["a", "seen"]], fraction=0.0)
    batch = log.training.batch(np.array([4, 5, 10, 19]))
    assert batch.ids["x"].ids.tolist() == [0, 1, 2, 2]
    assert batch.ids["seen"].ids.tolist() == [5, 6, 6, 7, 11, 12, 20, 21]  # the newest two
    assert batch.ids["a x seen"].lengths.tolist() == [2, 2, 2, 2]
    assert batch.ids["a x seen"].ids[0] == pair_ids(np.array([1]), np.array([5]))[0]
    assert log.held_out is None
    assert log.features["x"].boundaries == (5.0, 10.0)


def test_stated_keys_of_a_feature_imply_its_kind() -> None:
    rows = [{"label": n % 2, "user_id": n, "x": n, "tags": f"a,{n}", "item_history": [n]} for n in range(9)]
    stated = [
        FeatureBlock(name="user_id", buckets=4),
        FeatureBlock(name="x", boundaries=[2.0, 5.0]),
        FeatureBlock(name="tags", separator=","),
    ]
    features = find_features(rows, RankingBlock(features=stated))
    assert kinds(features) == {"user_id": "buckets", "x": "buckets", "tags": "ids", "item_history": "sequence"}
    assert [features[name].buckets for name in ("user_id", "x")] == [4, 3]


def test_a_sequence_may_have_a_table_of_its_own() -> None:
    rows = [{"label": n % 2, "item_id": n, "item_history": [n]} for n in range(9)]
    assert find_features(rows, RankingBlock())["item_history"].table == "item_id"
    settings = RankingBlock(features=[FeatureBlock(name="item_history", table="item_history")])
    assert find_features(rows, settings)["item_history"].table == "item_history"


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


def test_the_audit_counts_ids(tmp_path: Path) -> None:
    start = 18_000 * 86_400
    rows = [
        {"label": n % 2, "user_id": n // 2, "score": float(n % 2), "time": start + n * 8640} for n in range(40)
    ]  # ten rows a day, five new users a day
    audit = audit_log(log_of(tmp_path, "log.jsonl", json_lines([*rows, {**rows[0], "label": "maybe"}])))
    users = audit.ids["user_id"]
    assert (users.ids, users.lookups, users.once, users.new_a_period, users.unseen) == (15, 30, 0.0, 5.0, 1.0)
    assert users.covered[2] == (1.0, 1.0)
    assert users.covered[5] == (0.0, 0.0)
    assert [(period.name, period.rows, period.rates) for period in audit.periods] == [
        ("2019-04-14", 10, (0.5,)),
        ("2019-04-15", 10, (0.5,)),
        ("2019-04-16", 10, (0.5,)),
    ]
    assert audit.reasons == {"not a label": 1}
    assert any("score alone predicts label (AUC 1.000)" in leak for leak in audit.leaks)


def test_every_label_may_leak_and_rates_of_many_rows_are_exact(tmp_path: Path) -> None:
    rows = [{"clicked": n % 3 == 0, "bought": n % 2, "score": n % 2 + n / 1000, "user_id": n % 7} for n in range(40)]
    audit = audit_log(log_of(tmp_path, "log.jsonl", json_lines(rows), label=["clicked", "bought"]))
    assert [leak for leak in audit.leaks if "alone" in leak] == [
        "score alone predicts bought (AUC 1.000): known in advance?"
    ]
    many = 2**24 + 2**22  # float32 cannot count them
    training = SimpleNamespace(
        labels=np.broadcast_to(np.float32(1), (many, 2)),
        periods=lambda: np.zeros(many, np.int8),
        features=SimpleNamespace(time=None),
        by_file=False,
        store=SimpleNamespace(summary=SimpleNamespace(files=["log"])),
    )
    assert [period.rates for period in log_audit._periods(training)] == [(1.0, 1.0)]  # type: ignore[arg-type]


def test_ids_with_weights_in_some_rows_alone(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"label": n % 2, "tags": {"a": 0.5}} for n in range(40)]
    rows[20]["tags"] = ["a", "b"]
    log = log_of(tmp_path, "log.jsonl", json_lines(rows), fraction=0)
    found = log.training.batch(np.array([19, 20])).ids["tags"].weights
    assert found is not None and found.tolist() == [0.5, 1.0, 1.0]
    features = find_features([{"label": 0, "tags": ["a", "b"]}], RankingBlock())
    with pytest.raises(BadRowError, match="weights of ids: tags had none when the features were detected"):
        encode_rows([{"tags": {"a": 0.5}}], features)


def test_the_audit_says_what_the_jobs_own_admission_gives(tmp_path: Path) -> None:
    seen = {"a": 1, "b": 2, "c": 5, "d": 12}
    ids = [name for name, count in seen.items() for _ in range(count)]
    rows = [{"label": n % 2, "user_id": name, "time": 10**9} for n, name in enumerate(ids)]
    log = log_of(tmp_path, "log.jsonl", json_lines(rows), fraction=0.0)
    assert len(log.training) == 20 and audit_log(log).ids["user_id"].admitted is None
    by_count = audit_log(log, admission=AdmissionBlock(count=5)).ids["user_id"]
    assert by_count.admitted == by_count.covered[5] == (0.5, 17 / 20)
    rule = AdmissionBlock(count=2, probability=0.3)
    drawn = np.random.default_rng(0).random((20_000, 12)) < 0.3  # of each sighting from the second on
    chance = {name: drawn[:, : count - 1].any(1).mean() for name, count in seen.items()}
    admitted = audit_log(log, admission=rule).ids["user_id"].admitted
    assert admitted is not None
    assert admitted[0] == pytest.approx(np.mean(list(chance.values())), abs=0.01)
    assert admitted[1] == pytest.approx(sum(chance[name] * count for name, count in seen.items()) / 20, abs=0.01)


def test_the_audit_finds_held_out_rows_that_are_trained_on(tmp_path: Path) -> None:
    rows = [{"label": n % 2, "user_id": n % 4} for n in range(40)]
    audit = audit_log(log_of(tmp_path, "log.jsonl", json_lines(rows)))
    assert any("10 held-out rows are in the training part too" in leak for leak in audit.leaks)
    assert any("no time column" in leak for leak in audit.leaks)


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


def test_integers_of_400_digits_are_bad_cells(tmp_path: Path) -> None:
    rows = [{"label": n % 2, "x": n / 2, "user": f"u{n}", "ts": n} for n in range(40)]
    bad = [{**rows[0], "ts": 10**400}, {**rows[0], "x": 10**400}]
    stated = [FeatureBlock(name="x", kind="dense")]
    log = log_of(tmp_path, "log.jsonl", json_lines([*rows, *bad]), features=stated, fraction=0.0)
    assert [(row, reason.partition(":")[0]) for _, row, reason in reasons_of(log)] == [
        (41, "not a time"),
        (42, "not a number"),
    ]


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("age", "age is a number, and a cross is of ids", "{name: age, kind: buckets}"),
        ("label", "label is not a feature, and a cross combines two features", "those with ids are user_id"),
        ("ts", "ts is not a feature, and a cross combines two features", "those with ids are user_id"),
    ],
)
def test_a_cross_of_what_has_no_ids_is_refused(name: str, message: str, hint: str) -> None:
    rows = [{"label": n % 2, "user_id": n, "age": n / 2, "ts": n} for n in range(9)]
    with pytest.raises(UserError) as found:
        find_features(rows, RankingBlock(crosses=[["user_id", name]]))
    (problem,) = found.value.problems
    assert (problem.message, problem.key) == (message, "ranking.crosses[0]")
    assert hint in problem.suggestion


def repeated(log: ClickLog) -> list[str]:
    return [leak for leak in audit_log(log).leaks if "training part too" in leak]


def test_rows_with_other_lists_or_weights_are_not_the_same(tmp_path: Path) -> None:
    lines = [f"{n % 2} {n}:1 {n + 1}:0.5" for n in range(40)]
    assert repeated(log_of(tmp_path, "one.svm", "\n".join(lines))) == []
    weights = [f"{n % 2} 3:{n + 1} 4:{n + 2}" for n in range(40)]
    assert repeated(log_of(tmp_path, "two.svm", "\n".join(weights))) == []
    same = [*lines[:30], *lines[:5], *lines[35:]]
    assert len(found := repeated(log_of(tmp_path, "three.svm", "\n".join(same)))) == 1
    assert found[0].startswith("5 held-out rows")
    # A bag has no order, a sequence has.
    rows = [{"label": 1, "tags": [n, n + 1], "history": [n, n + 1]} for n in range(30)]
    turned = {"tags": [{**row, "tags": row["tags"][::-1]} for row in rows[:10]]}
    turned["history"] = [{**row, "history": row["history"][::-1]} for row in rows[:10]]
    assert repeated(log_of(tmp_path, "tags.jsonl", json_lines([*rows, *turned["tags"]])))[0].startswith("10 held-out")
    assert repeated(log_of(tmp_path, "history.jsonl", json_lines([*rows, *turned["history"]]))) == []
