"""The audit of a click log: counted ids, rates of labels, leaks, and held-out rows that are trained on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from opened_logs import json_lines, log_of

from stoker.data.ranking import log_audit
from stoker.data.ranking.click_log import ClickLog, open_log
from stoker.data.ranking.log_audit import audit_log
from stoker.data.ranking.log_gate import log_problems
from stoker.data.ranking.log_warnings import log_warnings
from stoker.data.ranking.ranking_block import AdmissionBlock, RankingBlock
from stoker.job.blocks.source_block import SourceBlock


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


@pytest.mark.parametrize("other", [1000.0, 1e9, -1e11])
def test_rows_with_times_in_another_unit_are_dropped(other: float, tmp_path: Path) -> None:
    times = [(1_700_000_000 + n * 60) * (other if n % 10 == 3 else 1) for n in range(40)]
    rows = [{"label": n % 2, "user_id": n % 7, "ts": time} for n, time in enumerate(times)]
    log = log_of(tmp_path, "log.jsonl", json_lines(rows))
    audit = audit_log(log)
    assert audit.reasons == {"time in another unit": 4}
    assert {period.name for period in audit.periods} == {"2023-11-14"}
    (problem,) = log_problems(log, [SourceBlock(path="log.jsonl", max_dropped=0.05)], [])
    assert problem.suggestion == "write all times in one unit"


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
        features=SimpleNamespace(time_unit=None),
        by_file=False,
        store=SimpleNamespace(summary=SimpleNamespace(files=["log"])),
    )
    assert [period.rates for period in log_audit._periods(training)] == [(1.0, 1.0)]  # type: ignore[arg-type]


def test_a_number_that_falls_with_the_label_may_leak_it_and_equal_numbers_do_not(tmp_path: Path) -> None:
    rows = [{"label": n % 2, "down": -1.5 * (n % 2), "flat": n // 2 % 3 + 0.5, "user_id": n} for n in range(48)]
    leaks = audit_log(log_of(tmp_path, "log.jsonl", json_lines(rows), fraction=0)).leaks
    assert leaks == ("down alone predicts label (AUC 0.000): known in advance?",)
    auc = log_audit._auc(np.array([1.0, 1.0, 1.0, 2.0]), np.array([0.0, 1.0, 0.0, 1.0]))
    assert auc == (1 + 1 + 0.5 + 0.5) / 4


def test_rare_values_of_a_label_are_warned_of(tmp_path: Path) -> None:
    rows = [{"label": int(n == 3), "user_id": n % 7, "bought": n % 2} for n in range(40)]
    log = log_of(tmp_path, "log.jsonl", json_lines(rows), label=["label", "bought"])
    assert log_warnings(log, []) == [
        "label label is 1 in 1 of 30 training rows, too few to learn from",
        "label label has the same value in all 10 held-out rows, so there is no AUC; write a larger "
        "`evaluate.fraction`",
    ]


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


def test_the_last_periods_are_shown(tmp_path: Path) -> None:
    rows = [{"label": n % 2, "user_id": n % 5, "time": 10**9 + n * 86_400} for n in range(20)]
    periods = audit_log(log_of(tmp_path, "log.jsonl", json_lines(rows), fraction=0)).periods
    assert [periods[0].name, periods[-1].name, len(periods)] == ["2001-09-15", "2001-09-28", 14]


def test_rows_without_ids_and_lookups_of_new_ids_are_counted(tmp_path: Path) -> None:
    rows = [{"label": n % 2, "user_id": 7 if n < 34 else 9, "tags": [1, 2] if n % 3 else []} for n in range(40)]
    ids = audit_log(log_of(tmp_path, "log.jsonl", json_lines(rows))).ids
    assert (ids["tags"].lookups, ids["tags"].empty) == (40, 10)
    assert ids["user_id"].unseen == 0.6  # of ten lookups


def test_rows_that_differ_in_one_label_are_not_the_same(tmp_path: Path) -> None:
    rows = [{"a": n % 2, "b": int(n >= 30), "user_id": n % 4} for n in range(40)]
    assert repeated(log_of(tmp_path, "log.jsonl", json_lines(rows), label=["a", "b"])) == []
    assert repeated(log_of(tmp_path, "log.jsonl", json_lines(rows), label=["a"], ignore=["b"])) != []


def test_training_rows_later_than_the_first_held_out_one_are_counted(tmp_path: Path) -> None:
    for name, first in (("log", 0), ("later", 20)):
        rows = [{"label": n % 2, "user_id": n % 5, "time": 10**9 + (first + n) * 60} for n in range(40)]
        (tmp_path / f"{name}.jsonl").write_text(json_lines(rows))
    data, held_out = ([SourceBlock(path=f"{name}.jsonl")] for name in ("log", "later"))
    log = open_log(data, RankingBlock(), tmp_path, held_out=held_out, fraction=0)
    assert "19 training rows are later than the first held-out one" in audit_log(log).leaks


def test_a_conversion_after_some_clicks_can_be_learnt(tmp_path: Path) -> None:
    rows = [{"click": n % 2, "buy": int(n % 4 == 1), "user_id": n % 7} for n in range(40)]
    log = log_of(tmp_path, "log.jsonl", json_lines(rows), label=["click", "buy"], model="esmm")
    assert log_problems(log, [SourceBlock(path="log.jsonl")], []) == []
