"""Commands on ``task: ranking``, and errors of its jobs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click_logs import ranking_job
from running import run, write_job

from stoker.cli.main import main
from stoker.data.ranking.features import Column, Features
from stoker.data.ranking.ranking_block import RankingBlock
from stoker.data.ranking.recorded_features import features_of_run
from stoker.data.sources import open_source
from stoker.errors import CodeFailed, UserError
from stoker.hardware.process_device import Device
from stoker.job.blocks.source_block import SourceBlock
from stoker.job.load_job import load_job
from stoker.runs.run_folder import RunFolder
from stoker.train.prepare import prepare
from stoker.train.prepared import Prepared
from stoker.train.ranking.check_log import check_log
from stoker.train.ranking.job_log import audit_of, open_log_of
from stoker.train.ranking.prepare_ranking import build
from stoker.train.ranking.ranking_tables import shape_of
from stoker.train.ranking.ranking_task import RankingTask
from stoker.verify.layout_cases import Cell
from stoker.verify.toy_job import make_twin


def test_a_row_is_shown_as_the_model_receives_it(clicks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (clicks / "clicks.jsonl").open("a") as file:
        file.write('{"clicked": "x"}\n')
    block = {"crosses": [["user_id", "device"]], "features": [{"name": "item_history", "longest": 2}]}
    write_job(clicks, ranking_job(ranking=block, data={"path": "clicks.jsonl", "max_dropped": 0.5}))
    rows = [json.loads(line) for line in (clicks / "clicks.jsonl").read_text().splitlines()]
    number = next(n for n, row in enumerate(rows[:100]) if len(row["item_history"]) > 2 and row["tags"])
    assert (
        main(["data", "job.yaml", "--json", "--rows", f"clicks.jsonl:{number + 1}", "--rows", "clicks.jsonl:241"]) == 0
    )
    shown, dropped = json.loads(capsys.readouterr().out)["rows"]
    log = open_log_of(load_job(clicks / "job.yaml", []), clicks)
    batch = log.training.batch(np.array([number]))  # the rows are in the order of time
    found = {(field["name"], field["kind"]): field["encoded"] for field in shown["fields"]}
    assert shown["part"] == "training" and found["clicked", "label"] == str(rows[number]["clicked"])
    assert float(found["price", "dense"]) == pytest.approx(batch.dense[0, 0], abs=1e-5)
    assert found["user_id", "id"] == str(rows[number]["user_id"])
    history = [f"hash {each}" for each in batch.ids["item_history"].ids]
    assert len(history) == 2
    total = len(rows[number]["item_history"])
    assert found["item_history", "sequence"] == ", ".join([*history, f"the newest 2 of {total}"])
    tags = zip(batch.ids["tags"].ids, batch.ids["tags"].weights, strict=True)
    assert found["tags", "ids"] == ", ".join(f"hash {each} with weight {weight:g}" for each, weight in tags)
    assert found["user_id x device", "cross"] == f"hash {batch.ids['user_id x device'].ids[0]}"
    assert (dropped["dropped"], dropped["fields"]) == ("not a label: clicked is 'x', and labels are 0 and 1", [])
    assert main(["data", "job.yaml", "--rows", f"clicks.jsonl:{number + 1}"]) == 0
    assert history[0] in capsys.readouterr().out
    assert main(["data", "job.yaml", "--rows", "clicks.jsonl:300"]) == 2
    assert "there is no such row; the sources are clicks.jsonl" in capsys.readouterr().err


def test_a_row_is_shown_of_each_file_of_the_name(clicks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = (clicks / "clicks.jsonl").read_text().splitlines(keepends=True)
    for folder, some in (("a", lines[:120]), ("b", lines[120:])):
        (clicks / folder).mkdir()
        (clicks / folder / "log.jsonl").write_text("".join(some))
    write_job(clicks, {**ranking_job(), "data": ["a/log.jsonl", "b/log.jsonl"]})
    for wanted, folders in (("log.jsonl:7", "ab"), ("b/log.jsonl:7", "b")):
        assert main(["data", "job.yaml", "--json", "--rows", wanted]) == 0
        shown = json.loads(capsys.readouterr().out)["rows"]
        assert [row["source"] for row in shown] == [f"{clicks}/{folder}/log.jsonl" for folder in folders]


def test_the_verbs_from_the_log_to_its_metrics(clicks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = ranking_job(steps=20, ranking={"slices": ["device"]})
    write_job(clicks, job)
    assert main(["data", "job.yaml", "--json"]) == 0
    audit = json.loads(capsys.readouterr().out)
    assert (audit["training"], audit["held_out"], audit["time"]) == (180, 60, "timestamp")
    assert {column["name"]: column["kind"] for column in audit["columns"]} == {
        "user_id": "id", "item_id": "id", "item_history": "sequence", "tags": "ids", "price": "dense", "device": "id",
    }  # fmt: skip
    assert main(["data", "job.yaml"]) == 0
    assert "seen once" in capsys.readouterr().out
    assert main(["train", "job.yaml", "steps=10"]) == 0
    printed = "".join(capsys.readouterr())
    assert "10 of 12 rows (12 at a time), 120 in all" in printed and printed.count("predicted ") == 1
    assert main(["train", "job.yaml"]) == 0
    assert [e["event"] for e in RunFolder(clicks / "run").read_events() if e["event"] in ("started", "resumed")] == [
        "started",
        "resumed",
    ]
    capsys.readouterr()
    assert main(["eval", "run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    events = [event for event in RunFolder(clicks / "run").read_events() if event["event"] == "evaluated"]
    assert found["log_loss"] == pytest.approx(events[-1]["log_loss"], rel=1e-9)
    assert found["auc"] == pytest.approx(events[-1]["auc"])
    assert found["calibration"] is not None
    assert (found["rows_used"], found["rows_dropped"], found["step"]) == (60, 0, 20)
    assert set(found["slices"]["device"]) == {"phone", "desktop"}
    low, high = (found["labels"]["clicked"]["auc"][end] for end in ("low", "high"))
    assert low < found["auc"] < high
    lines = (clicks / "clicks.jsonl").read_text().splitlines(keepends=True)[:49]
    with (clicks / "other.jsonl").open("w") as file:
        file.writelines([*lines, json.dumps({**json.loads(lines[0]), "user_id": 99}) + "\n"])
        file.write('{"clicked": "maybe"}\n')
    assert main(["eval", "run", "other.jsonl", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rows_used"], found["rows_dropped"]) == (50, 1)
    assert (found["ids_without_row"]["user_id"], found["ids_without_row"]["device"]) == (0.02, 0.0)
    assert main(["eval", "run", "other.jsonl"]) == 0
    printed = capsys.readouterr().out
    assert "ids without a row: user_id 2.0%" in printed and "50 rows; 1 dropped; step 20" in printed
    options = (["--against", "run"], ["--answers", "other.jsonl"], ["--tasks", "offline/arithmetic"], ["--compare"])
    for words in options:
        assert main(["eval", "run", *words]) == 2
        assert f"{words[0]} is for language models, and run is a run of task ranking" in capsys.readouterr().err


@pytest.mark.parametrize("content", ['{"features": 5}', '{"labels": ["a"], "columns": [5]}', "[" * 9999, None])
def test_a_run_without_its_features_is_refused(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "features.json"
    path.write_text(content) if content else os.mkfifo(path)
    with pytest.raises(UserError, match=r"features\.json: (these are not|cannot be read: it is a FIFO)"):
        features_of_run(RunFolder(tmp_path))


def test_metrics_by_a_column_that_the_rows_lack_are_named_and_left_out(
    clicks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_job(clicks, ranking_job(steps=2, ranking={"slices": ["device"], "ignore": ["device"], "group": "device"}))
    assert main(["train", "job.yaml"]) == 0
    rows = [json.loads(line) for line in (clicks / "clicks.jsonl").read_text().splitlines()]
    without = [{name: value for name, value in row.items() if name != "device"} for row in rows]
    (clicks / "other.jsonl").write_text("".join(json.dumps(row) + "\n" for row in without))
    capsys.readouterr()
    assert main(["eval", "run", "other.jsonl", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["columns_missing"], found["slices"]) == (["device"], {}) and "grouped_auc" not in found
    assert main(["eval", "run", "other.jsonl"]) == 0
    assert "no row has a value in column 'device', so there are no metrics by it" in capsys.readouterr().out
    assert main(["eval", "run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "grouped_auc" in found and set(found["slices"]["device"]) == {"phone", "desktop"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "dlmr"}, "there is no ranking model `dlmr`; write dlrm"),
        ({"model": "two-tower"}, "needs to know which features are the item's"),
        ({"model": "two-tower", "item": ["itm"]}, "the rows have no column 'itm'; did you mean item_id?"),
        ({"model": "two-tower", "item": ["price"]}, "price is not a feature with ids; write `features: [{name: price"),
        (
            {"ignore": ["bought", "user_id", "item_history", "tags", "price", "device"]},
            "dlrm multiplies pairs of vectors, and there is one: item_id; write `model: deepfm`",
        ),
        (
            {"model": "two-tower", "item": ["item_id", "price"]},
            "ids; write `features: [{name: price, kind: buckets}]`",
        ),
        (
            {"model": "two-tower", "item": ["item_id"], "crosses": [["user_id", "item_id"]]},
            "user_id x item_id combines a feature of the user and one of the item",
        ),
        (
            {"model": "two-tower", "item": ["item_id", "tags"], "crosses": [["item_id", "tags"]]},
            "item_id x tags is not of the same tower as its features; add 'item_id x tags'",
        ),
        ({"model": "din", "ignore": ["item_history"]}, "`model: din` needs a sequence"),
        ({"label": "click"}, "the rows have no column 'click'; did you mean clicked?"),
        ({"features": [{"name": "price", "kind": "buckets", "boundaries": [2.0, 1.0]}]}, "boundaries rise"),
        ({"progressive": True}, "trains on each row once"),
        ({"features": [{"name": "price", "width": 3}]}, "price is not a feature with ids, so it has no embedding"),
        (
            {"features": [{"name": "item_id", "width": 3}, {"name": "item_history", "width": 5}]},
            "item_history shares the rows of item_id, which have 3 numbers; write `width: 3`",
        ),
        ({"table": {"eviction": {"age": 9, "score": "recency"}}}, "`score` ranks rows, but `max_rows` is not given"),
        ({"table": {"eviction": {"every": 10}}}, "needs to know which rows go; write `age: 10000` or `max_rows"),
        ({"table": {"admission": {}}}, "`admission` needs to know which ids get a row; write `count: 2` or"),
        ({"table": {"admission": {"probability": 0.5, "cells": 9}}}, "`cells` are the counters of `count`"),
        ({"item": ["item_id"]}, "`item` has no effect with `model: dlrm`; remove it, or write `model: two-tower`"),
        ({"levels": 3, "model": "mmoe"}, "`levels` has no effect with `model: mmoe`; remove it, or write `model: ple`"),
        ({"experts": 2}, "`experts` has no effect with `model: dlrm`; remove it, or write `model: mmoe`"),
        (
            {"table": {"beta1": 0.8}},
            "no effect with `optimizer: rowwise-adagrad`; remove it, or write `optimizer: adam`",
        ),
        ({"layers": 2, "model": "deepfm"}, "`layers` has no effect with `model: deepfm`; remove it, or write"),
        ({"table": {"l1": 0.1}}, "`table.l1` has no effect with `optimizer: rowwise-adagrad`; remove it, or write `o"),
        ({"table": {"l2": 0.1, "optimizer": "adam"}}, "`table.l2` has no effect with `optimizer: adam`"),
        ({"table": {"initial": 0.1, "optimizer": "adam"}}, "`table.initial` has no effect with `optimizer: adam`"),
        ({"table": {"eps": 0.1, "optimizer": "sgd"}}, "`table.eps` has no effect with `optimizer: sgd`"),
        ({"features": [{"name": "device"}, {"name": "device", "width": 3}]}, "`device` has an entry in `features`"),
        ({"features": [{"name": "price", "kind": "dense", "buckets": 4}]}, "`buckets` has no effect on a feature of"),
        ({"features": [{"name": "tags", "kind": "ids", "longest": 4}]}, "write `kind: sequence`, or remove it"),
        ({"features": [{"name": "price", "buckets": 4, "boundaries": [1.0]}]}, "and `boundaries` are given; keep one"),
        ({"features": [{"name": "price", "buckets": 4, "separator": ","}]}, "keys of different kinds of features"),
        ({"features": [{"name": "price", "longest": 4}]}, "`longest` has no effect: price is found to be of `kind: d"),
        ({"features": [{"name": "price", "table": "device"}]}, "`table` has no effect: price is found to be of `ki"),
        ({"features": [{"name": "device", "log": True}]}, "`log` has no effect: device is found to be of `kind: id"),
        ({"features": [{"name": "price", "separator": ";"}]}, "no value of price contains ';' in the first 10,000"),
        ({"features": [{"name": "tags", "separator": ";"}]}, "remove `separator`: its values are lists"),
        ({"features": [{"name": "clicked", "kind": "id"}]}, "clicked is named by `label`, so it is not a feature"),
        ({"features": [{"name": "bought", "kind": "id"}]}, "bought is named by `ignore`, so it is not a feature"),
        ({"features": [{"name": "timestamp"}]}, "timestamp is the time of the rows, found by its name, so it is"),
        ({"features": [{"name": "price"}], "weight": "price"}, "price is named by `weight`, so it is not a feature"),
        ({"features": [{"name": "device", "table": "item"}]}, "no other feature has the table item; did you mean it"),
        ({"features": [{"name": "device", "table": "price"}]}, "no other feature has the table price"),
        (
            {"features": [{"name": "device", "table": "tags"}, {"name": "tags", "table": "user_id"}]},
            "no other feature has the table tags; tags has the table user_id",
        ),
        ({"weight": "device"}, "not a weight: device is 'phone'; name another column, or remove `weight`"),
        ({"time": "device"}, "not a time: 'phone' in device; name another column, or remove `time`"),
        ({"label": "device"}, "labels must be 0 and 1, or numbers with `ranking.positive`"),
        ({"group": "qid"}, "device, timestamp; write the name of one, or remove `group`"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(changes: dict[str, Any], message: str, clicks: Path) -> None:
    job = ranking_job(ranking=changes)
    if "progressive" in changes:
        job = {**{key: value for key, value in job.items() if key != "steps"}, "epochs": 2}
    with pytest.raises(UserError) as error:
        prepare(load_job(write_job(clicks, job)), clicks)
    assert message in str(error.value)
    assert "job.yaml:" in str(error.value)


def test_a_warm_up_of_a_growing_log_does_not_depend_on_its_end(clicks: Path) -> None:
    def warmup(**train: Any) -> float:
        return load_job(write_job(clicks, ranking_job(ranking={"progressive": True}, train=train))).job.train.warmup

    assert warmup(schedule="constant") == 0
    assert (warmup(schedule="constant", warmup=0.1), warmup(schedule="linear")) == (0.1, 0.03)


def test_a_progressive_run_has_no_more_steps_than_rows(clicks: Path) -> None:
    def prepared(steps: int) -> Prepared:
        job = ranking_job(ranking={"progressive": True}, steps=steps, evaluate={"fraction": 0.25})
        return prepare(load_job(write_job(clicks, job)), clicks)

    prepared(15)
    with pytest.raises(UserError, match=r"job\.yaml:.*each row once, and 16 steps take 192 of 180 rows; write `epochs"):
        prepared(16)


@pytest.mark.parametrize(
    "changes",
    [
        {"ranking": {"progressive": True}, "steps": 16},
        {"ranking": {"model": "two-tower", "item": ["item_id"], "crosses": [["user_id", "item_id"]]}},
    ],
)
def test_a_run_that_has_trained_is_opened_where_a_new_one_is_refused(changes: dict[str, Any], clicks: Path) -> None:
    loaded = load_job(write_job(clicks, ranking_job(**changes)))
    build(loaded, open_log_of(loaded, clicks).features, Device("cpu", "fp64", ""))
    assert audit_of(loaded, clicks).problems
    for check in (prepare, check_log):
        with pytest.raises(UserError, match=r"and 16 steps take 192|each has its own tower"):
            check(loaded, clicks)


@pytest.mark.parametrize("model", ["wide-deep", "deepfm"])
def test_a_column_that_is_called_as_single_weights_is_named(
    model: str, clicks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [json.loads(line) for line in (clicks / "clicks.jsonl").read_text().splitlines()]
    named = "".join(json.dumps({**row, "user_id (first order)": "red"}) + "\n" for row in rows)
    (clicks / "named.jsonl").write_text(named)
    write_job(clicks, ranking_job(data="named.jsonl", ranking={"model": model}))
    assert main(["train", "job.yaml"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: job.yaml:")
    assert "a column 'user_id (first order)', the name of the first-order weights of user_id" in said


def test_the_item_of_a_history_is_the_feature_that_has_the_tables_name() -> None:
    columns = [Column(name, "id", table="item_id") for name in ("item_id", "last_item")]
    history = Column("history", "sequence", table="item_id")
    for ids in (columns, columns[::-1]):
        shape = shape_of(Features(("clicked",), (*ids, history)), RankingBlock(), unpooled=True)
        assert shape.sequences == {"history": "item_id"}


def test_sizes_of_ndcg_without_a_group_are_refused(clicks: Path) -> None:
    rows = [json.loads(line) for line in (clicks / "clicks.jsonl").read_text().splitlines()]
    text = "".join(json.dumps({"person": row.pop("user_id"), **row}) + "\n" for row in rows)
    (clicks / "clicks.jsonl").write_text(text)
    with pytest.raises(UserError, match=r"job\.yaml:.*`ranking\.at` has no effect without a group.*write `group:`"):
        prepare(load_job(write_job(clicks, ranking_job(ranking={"at": [5]}))), clicks)
    prepare(load_job(write_job(clicks, ranking_job(ranking={"at": [5], "group": "person"}))), clicks)
    prepare(load_job(write_job(clicks, ranking_job())), clicks)


@pytest.mark.slow  # runs a layout eight times
def test_verify_compares_layouts(clicks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_job(clicks, {**ranking_job(), "train": {"batch": 8}, "parallel": {"data": 2}})
    assert main(["verify", "job.yaml", "--steps", "3"]) == 0
    assert "1 of 1 layouts compute the same as one process" in capsys.readouterr().out


@pytest.mark.parametrize("pattern", ["*.jsonl", "log/*.jsonl"])
def test_verify_reads_the_files_of_a_pattern(
    pattern: str, clicks: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (clicks / "log").mkdir()
    (clicks / "log" / "a.jsonl").write_text((clicks / "clicks.jsonl").read_text())
    elsewhere = tmp_path_factory.mktemp("twin")
    twin = make_twin(load_job(write_job(clicks, {**ranking_job(), "data": pattern})), clicks, elsewhere)
    assert open_source(SourceBlock.model_validate(twin.base["data"][0]), elsewhere).contents()


def test_verify_says_what_its_copy_leaves_out(clicks: Path) -> None:
    def facts(**ranking: Any) -> str:
        return "; ".join(make_twin(load_job(write_job(clicks, ranking_job(ranking=ranking))), clicks, clicks).facts)

    assert not facts()
    servers = {"addresses": ["10.0.0.7:29500"], "secret": "run.secret"}
    assert "without `ranking.servers`" in facts(servers=servers) and "progressive" not in facts(servers=servers)
    assert "without `ranking.progressive`" in facts(progressive=True)


def test_the_twin_of_a_job_with_rounded_rows_is_a_job(clicks: Path) -> None:
    job = ranking_job(ranking={"table": {"dtype": "int8"}}) | {"train": {"batch": 8}}
    loaded = load_job(write_job(clicks, job))
    twin = make_twin(loaded, clicks, clicks)
    assert load_job(twin.job_file(Cell("", {}))).job.train.precision == "fp64"
    assert twin.facts == ("rows of tables in float64, as rows of int8 cannot be compared exactly",)


@pytest.mark.parametrize("other", [{"evaluate": {"fraction": 0.5}}, {"ranking": {"progressive": True}}])
def test_the_twin_takes_as_many_samples_as_its_steps_have(other: dict[str, Any], clicks: Path) -> None:
    loaded = load_job(write_job(clicks, ranking_job(**other) | {"train": {"batch": 64}}))
    twin, cell = make_twin(loaded, clicks, clicks), Cell("", {}, accumulation=32)
    copy = load_job(twin.job_file(cell))
    assert copy.job.epochs is not None
    assert prepare(copy, clicks).task.epoch_samples(copy.job.epochs) == sum(twin.samples(cell))


@pytest.mark.parametrize(
    "table", [{"optimizer": "adam", "beta1": 0.8, "beta2": 0.99}, {"optimizer": "ftrl", "ftrl_beta": 0.5}]
)
def test_settings_of_optimizers_reach_the_tables(table: dict[str, Any], clicks: Path) -> None:
    task = run(clicks, ranking_job(ranking={"table": table}, steps=1)).prepared.task
    assert isinstance(task, RankingTask)
    for found in task.tables.tables:
        assert found.betas == (table.get("beta1", 0.9), table.get("beta2", 0.999))
        assert found.ftrl_beta == table.get("ftrl_beta", 1.0)


def test_the_audit_prints_what_the_jobs_admission_covers(clicks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_job(clicks, ranking_job())
    assert main(["data", "job.yaml"]) == 0 and "admitted" not in capsys.readouterr().out
    write_job(clicks, ranking_job(ranking={"table": {"admission": {"count": 5}}}))
    assert main(["data", "job.yaml"]) == 0
    lines = capsys.readouterr().out.splitlines()
    head = next(number for number, line in enumerate(lines) if "admitted: ids / lookups" in line)
    by_own, by_five = (lines[head].index(word) for word in ("admitted:", "seen 5+:"))
    own, five = (lines[head + 1][at:].split("  ")[0] for at in (by_own, by_five))
    assert own == five and "/" in own
    assert main(["data", "job.yaml", "--json"]) == 0
    ids = json.loads(capsys.readouterr().out)["ids"]
    assert all(found["admitted"] == found["covered"]["5"] for found in ids.values())


OWN = """
from torch import nn

class Sum(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.shape = shape
        self.head = nn.Linear(shape.width, shape.labels)

    def forward(self, inputs):
        return self.head(sum(inputs.vectors[name] for name in self.shape.features))
"""


def test_a_module_of_the_users_own(clicks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (clicks / "own_tower.py").write_text(OWN)
    ran = run(clicks, ranking_job(ranking={"model": "own_tower:Sum"}, steps=20, evaluate={"every": 20}))
    assert len(ran.losses) == 20
    assert main(["eval", "run", "--json"]) == 2
    assert "write --trust-remote-code" in capsys.readouterr().err
    assert main(["eval", "run", "--json", "--trust-remote-code"]) == 0
    assert json.loads(capsys.readouterr().out)["auc"] > 0


def test_a_module_of_the_users_own_that_fails_is_told_at_its_key(clicks: Path) -> None:
    (clicks / "short_tower.py").write_text(OWN.replace("shape.labels", "shape.label"))
    with pytest.raises(CodeFailed, match=r"job\.yaml:\d+:\d+: ranking\.model: short_tower:Sum raised AttributeError"):
        run(clicks, ranking_job(ranking={"model": "short_tower:Sum"}))
