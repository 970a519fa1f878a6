"""The features that are found in rows, and those that a job states."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from opened_logs import json_lines, kinds, log_of, reasons_of

from stoker.data.ranking.column_kinds import column_of, with_table
from stoker.data.ranking.features import Column
from stoker.data.ranking.find_features import find_features
from stoker.data.ranking.ids import pair_ids
from stoker.data.ranking.ranking_block import FeatureBlock, RankingBlock
from stoker.errors import UserError


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


@pytest.mark.parametrize("text", ["NA", "N/A", "null", "None", "-", "", "NaN"])
def test_texts_of_missing_numbers_leave_a_column_of_numbers(text: str, tmp_path: Path) -> None:
    lines = "".join(f"{n % 2},{n % 5},{text if n % 3 else n},{text or 'x'}\n" for n in range(40))
    log = log_of(tmp_path, "log.csv", f"label,a,age,country\n{lines}", fraction=0.0)
    assert kinds(log.features) == {"a": "dense", "age": "dense", "country": "id"}
    assert len(log.training) == 40
    assert np.isnan(log.training.store.array("column1")).sum() == 26


def test_ids_that_are_mostly_numbers_say_which_value_is_not() -> None:
    rows = [{"label": 1, "age": "old" if n % 10 == 0 else str(n)} for n in range(40)]
    assert find_features(rows, RankingBlock())["age"].why == "texts, though 90% are numbers; 'old' is not"


@pytest.mark.parametrize(("others", "kind"), [(1, "id"), (5, "id"), (6, "dense")])
def test_a_few_fractions_leave_a_column_of_ids(others: int, kind: str, tmp_path: Path) -> None:
    lines = "".join(f"{n % 2},{n + 0.5 if n < others else n}\n" for n in range(100))
    log = log_of(tmp_path, "log.csv", f"label,user_id\n{lines}", fraction=0.0)
    assert kinds(log.features) == {"user_id": kind}
    assert len(log.training) == 100
    if kind == "id":
        why = f"integers under a name of ids, but for {others} values such as '0.5'"
        assert log.features["user_id"].why == why


@pytest.mark.parametrize("odd", [[1.5], {"a": 1}, ["a", "b"]])
def test_one_list_does_not_decide_the_kind_of_a_column(odd: Any, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"label": n % 2, "price": n / 8, "user_id": n, "city": f"c{n}"} for n in range(200)]
    rows += [{**rows[0], name: odd} for name in ("price", "user_id", "city")]
    log = log_of(tmp_path, "log.jsonl", json_lines(rows), fraction=0.0)
    assert kinds(log.features) == {"price": "dense", "user_id": "id", "city": "id"}
    assert [row for _, row, _ in reasons_of(log)] == [201, 202, 203]


def test_a_hundredth_of_lists_among_ids_or_of_weights_among_lists(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"label": n % 2, "tags": f"t{n}", "seen": [n], "few": None} for n in range(200)]
    rows[7] |= {"tags": ["a", "b"], "few": ["a", 7, True], "seen": {"a": 0.5}}
    rows[8] |= {"tags": ["a"], "few": 0.5, "seen": {"a": 0.5}}
    features = find_features(rows, RankingBlock())
    assert kinds(features) == {"tags": "ids", "seen": "ids", "few": "ids"}
    assert [column.weighted for column in features] == [False, True, False]
    log = log_of(tmp_path, "log.jsonl", json_lines([*rows, {"label": 0, "few": True}]), fraction=0.0)
    assert reasons_of(log) == [("log.jsonl", 9, "not an id: the fraction 0.5 in few")]
    assert log.training.batch(np.array([199])).ids["few"].ids.tolist() == [1]


def test_numbers_whose_rows_are_dropped_do_not_decide_the_logarithm() -> None:
    rows = [{"label": n % 2, "amount": n / 8} for n in range(24)]
    logs = [find_features([*rows, {"label": 0, "amount": n}], RankingBlock())["amount"].log for n in (1e38, 1e39)]
    assert logs == [True, False]


def test_true_and_false_of_csv_are_those_of_json(tmp_path: Path) -> None:
    rows = [{"label": n % 2, "a": n, "flag": n % 3 == 0} for n in range(40)]
    lines = "".join(f"{n % 2},{n},{str(n % 3 == 0).lower() if n % 4 else n % 3 == 0}\n" for n in range(40))
    logs = [
        log_of(tmp_path, "log.jsonl", json_lines(rows), fraction=0.0),
        log_of(tmp_path, "log.csv", f"label,a,flag\n{lines}", fraction=0.0),
    ]
    assert [kinds(log.features)["flag"] for log in logs] == ["dense", "dense"]
    first, second = (log.training.batch(np.arange(40)).dense for log in logs)
    np.testing.assert_array_equal(first, second)


def test_a_column_that_is_not_there_is_named_with_the_nearest() -> None:
    with pytest.raises(UserError, match="the rows have no column 'labl'; did you mean label") as found:
        find_features([{"label": 1, "a": 2}], RankingBlock(label="labl", crosses=[["a"]], item=["a", "b"]))
    assert [problem.key for problem in found.value.problems] == ["ranking.label", "ranking.item", "ranking.crosses[0]"]
    with pytest.raises(UserError, match="the rows have no column 'bb'") as found:
        find_features([{"label": 1, "a": 2}], RankingBlock(item=["a x bb"], crosses=[["a", "bb"]]))
    assert [problem.key for problem in found.value.problems] == ["ranking.crosses[0]"]


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


def test_a_boundary_belongs_to_the_bucket_above_it(tmp_path: Path) -> None:
    values = [0.1, 0.2, 0.3, 0.6, 0.7, 0.9]
    boundaries = [0.1, 0.3, 0.6, 0.7, 0.9]  # of which float32 rounds some up and some down
    rows = [{"label": n % 2, "a": n, "x": value} for n, value in enumerate(values)]
    stated = [FeatureBlock(name="a", kind="id"), FeatureBlock(name="x", boundaries=boundaries)]
    log = log_of(tmp_path, "log.jsonl", json_lines(rows), features=stated, fraction=0.0)
    assert log.training.batch(np.arange(6)).ids["x"].ids.tolist() == np.digitize(values, boundaries).tolist()


def test_a_column_without_a_name_is_named_or_ignored() -> None:
    rows = [{"": n, "label": n % 2, "user_id": n} for n in range(9)]
    with pytest.raises(UserError, match="a column of the rows has no name"):
        find_features(rows, RankingBlock())
    assert kinds(find_features(rows, RankingBlock(ignore=[""]))) == {"user_id": "id"}


def test_a_column_that_is_called_as_a_cross_is_ignored() -> None:
    rows = [{"label": n % 2, "user_id": n, "zip": n, "user_id x zip": n} for n in range(9)]
    name, crosses = "user_id x zip", [["user_id", "zip"]]
    with pytest.raises(UserError, match="the rows have a column 'user_id x zip', as the cross is called"):
        find_features(rows, RankingBlock(crosses=crosses))
    assert kinds(find_features(rows, RankingBlock(crosses=crosses, ignore=[name])))[name] == "cross"


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


@pytest.mark.parametrize("stated", [[], [FeatureBlock(name="item_history", kind="sequence", separator=",")]])
def test_lists_that_are_texts_are_refused_unless_each_is_one_id(stated: list[FeatureBlock]) -> None:
    rows = [{"label": n % 2, "item_id": n, "item_history": text} for n, text in enumerate(["[1, 2]", "[]", "", "[3]"])]
    with pytest.raises(
        UserError, match=r"item_history are texts such as '\[1, 2\]', and not lists; write `\|` between"
    ):
        find_features(rows, RankingBlock(features=stated))
    one_id = RankingBlock(features=[FeatureBlock(name="item_history", kind="id")])
    assert kinds(find_features(rows, one_id))["item_history"] == "id"
    for texts in (["[1,2]", "a", "b"], ["[deleted]", "[1]"]):
        others = [{"label": 1, "item_id": 2, "tag": text} for text in texts]
        assert kinds(find_features(others, RankingBlock()))["tag"] == "id"
    lists = [{**row, "item_history": [1, 2]} for row in rows]
    assert kinds(find_features(lists, RankingBlock()))["item_history"] == "sequence"


@pytest.mark.parametrize("large", [1.2345678901234568e18, "1.2345678901234568e+18", -9.1e15])
def test_ids_that_lost_digits_as_floats_are_refused(large: Any) -> None:
    rows = [{"label": n % 2, "user_id": value} for n, value in enumerate([large, None, 7.0, float("nan")])]
    with pytest.raises(UserError, match=r"the ids of user_id are floats such as -?[\d.]+e?\+?\d*, whose last digits"):
        find_features(rows, RankingBlock())
    exact = [1234567890123456789, "1234567890123456789", 17.0, 2.0**53, "123e4567", "12345e67", "5.5e+2", math.inf]
    for value in exact:
        rows = [{"label": n % 2, "user_id": value} for n in range(4)]
        assert find_features(rows, RankingBlock())["user_id"]


@pytest.mark.parametrize(
    ("values", "kind", "log"),
    [
        ([1.5] * 19 + ["bad"], "dense", False),
        ([1.5] * 18 + ["bad"], "id", False),
        ([2**31 - 1, 2**31 - 2], "dense", False),
        ([2**31, 5], "id", False),
        ([1] * 1000 + [5000], "dense", True),  # the mean is near, and one value far away
        ([1] * 1000 + [1500], "dense", False),
    ],
)
def test_the_bounds_of_numbers(values: list[Any], kind: str, log: bool) -> None:
    found = column_of("x", values, FeatureBlock(name="x"), is_criteo=False)
    assert (found.kind, found.log) == (kind, log)


def test_a_history_has_the_table_of_its_item_unless_the_job_names_one() -> None:
    item = Column("item", "id", table="item")
    assert with_table(Column("hist_items", "sequence", table="hist_items"), [item]).table == "item"
    assert with_table(Column("hist_items", "sequence", table="own"), [item]).table == "own"
