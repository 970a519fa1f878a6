"""Metrics of ``task: ranking``: by period, slice and group, of retrieval, and counts of added and evicted ids."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click_logs import CONSTANT, ranking_job
from running import run, write_job
from steps_in_layout import steps_in_layout

from stoker.checkpoint.dcp_store import Store
from stoker.checkpoint.rows_by_id import rows_by_id
from stoker.cli.main import main
from stoker.data.ranking.click_log import open_log
from stoker.data.ranking.features import Features
from stoker.data.ranking.ids import id_of
from stoker.data.ranking.ranking_block import RankingBlock
from stoker.job.blocks.source_block import SourceBlock
from stoker.launch.process_pool import Pool
from stoker.parallel.float64_mode import in_float64
from stoker.runs.run_folder import RunFolder
from stoker.scoring.ranking_metrics import auc, calibration, ndcg, normalised_entropy
from stoker.sparse.jagged_ids import JaggedIds
from stoker.train.ranking.evaluation_metrics import Scored, figures_of
from stoker.train.ranking.progressive import ValidationPeriod, over_periods, read_periods, write_period
from stoker.train.ranking.ranking_task import RankingBatch, RankingTask, scored_rows


def test_evaluations_say_how_many_ids_came_and_went(clicks: Path, pool: Pool) -> None:
    table = {"eviction": {"age": 1, "every": 2}}
    write_job(clicks, ranking_job(output="alone", ranking={"table": table}, train=CONSTANT))
    steps_in_layout(str(clicks), 6, ())
    write_job(clicks, ranking_job(output="two", ranking={"table": table}, train=CONSTANT))
    pool.run(steps_in_layout, str(clicks), 3, ("parallel.data=2",), world=2)
    pool.run(steps_in_layout, str(clicks), 6, ("parallel.data=2",), world=2)  # resumes from the checkpoint
    names = ("table_rows", "ids_admitted", "ids_evicted")
    found = [
        [tuple(event[name] for name in names) for event in RunFolder(clicks / run).read_events() if "auc" in event]
        for run in ("alone", "two")
    ]
    assert found[0] == found[1][:2] + found[1][-1:]
    rows, admitted, evicted = found[0][-1]
    state = rows_by_id(Store(clicks / "alone" / "checkpoints").load(6).tensors)
    assert rows == sum(len(tensor) for name, tensor in state.items() if name.endswith("/ids"))
    assert admitted - evicted == rows and evicted > found[0][1][2] > 0 == found[0][0][2]


@pytest.mark.slow
def test_each_day_is_evaluated_before_it_is_trained_on(clicks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = (clicks / "clicks.jsonl").read_text().splitlines(keepends=True)
    for day in (1, 2, 3):
        (clicks / f"day_{day}.jsonl").write_text("".join(lines[60 * (day - 1) : 60 * day]))
    block = {"progressive": True, "ignore": ["bought", "timestamp"]}
    common = {"train": CONSTANT, "evaluate": {}, "epochs": 1, "steps": None}

    def job(days: list[int], output: str) -> dict[str, Any]:
        changed = ranking_job(ranking=block, output=output, **common)
        changed["data"] = [f"day_{day}.jsonl" for day in days]
        return {key: value for key, value in changed.items() if value not in (None, {})}

    whole = run(clicks, job([1, 2, 3], "whole"))
    periods = read_periods(whole.folder.path)
    assert [(period["period"], period["step"], period["rows"]) for period in periods] == [(1, 6, 60), (2, 11, 60)]
    assert whole.prepared.task.describe_samples(0, 2) == [f"{clicks}/day_1.jsonl:{row}" for row in (1, 2)]
    metrics = whole.folder.read_metrics()
    assert metrics[10]["next_log_loss"] == periods[1]["log_loss"]
    assert "next_log_loss" not in metrics[11]
    assert metrics[10]["ids_admitted"] == metrics[10]["table_rows"] == metrics[5]["table_rows"] == 40  # all of them
    run(clicks, job([1, 2], "first"))
    assert main(["eval", "first", "day_3.jsonl", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["log_loss"] == pytest.approx(periods[1]["log_loss"], rel=1e-12)
    assert found["auc"] == pytest.approx(periods[1]["auc"], rel=1e-12)
    assert main(["eval", "whole", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["log_loss"] == pytest.approx(np.mean([period["log_loss"] for period in periods]))
    assert len(found["periods"]) == 2
    step = next(s for s in Store(clicks / "whole" / "checkpoints").steps() if 6 <= s < 11)
    assert main(["eval", "whole", "--at", str(step), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["log_loss"], found["step"], found["rows_used"]) == (pytest.approx(periods[0]["log_loss"]), 6, 60)
    early = next(s for s in Store(clicks / "whole" / "checkpoints").steps() if s < 6)
    assert main(["eval", "whole", "--at", str(early)]) == 2
    assert f"no period of the run had begun by step {early}" in capsys.readouterr().err
    assert main(["eval", "whole", "--at", "average"]) == 2
    assert "not with their averages" in capsys.readouterr().err


def test_half_a_line_of_a_killed_process_costs_one_period(tmp_path: Path) -> None:
    figures = figures_of(Scored(np.array([[0], [1]]), np.array([[-0.5], [0.5]])), ["clicked"], [])
    write_period(tmp_path, 1, ValidationPeriod(3, 0, 2), figures)
    with (tmp_path / "progressive.jsonl").open("a") as file:
        file.write('{"step": 5, "period": 4, "fir')
    write_period(tmp_path, 9, ValidationPeriod(5, 4, 6), figures)
    assert [(line["period"], line["first"], line["step"]) for line in read_periods(tmp_path)] == [(3, 0, 1), (5, 4, 9)]


def test_means_over_periods_are_by_label_and_of_every_metric(tmp_path: Path) -> None:
    def scored(labels: list[list[int]]) -> Scored:
        return Scored(np.array(labels), np.array([[-0.5, 0.25], [0.5, 0.75], [1.5, -0.25]])[: len(labels)])

    names = ["clicked", "bought"]
    first, second = scored([[0, 0], [0, 0]]), scored([[0, 1], [1, 0], [1, 1]])  # the first has no AUC
    found = [figures_of(rows, names, []) for rows in (first, second)]
    for number, figures in enumerate(found):
        write_period(
            tmp_path,
            5 * number + 1,
            ValidationPeriod(number, 2 * number, 2 * number + len((first, second)[number])),
            figures,
        )
    features = Features(("clicked", "bought"), ())
    means = over_periods(tmp_path, features)
    assert means is not None
    for name in names:
        assert means.labels[name]["auc"].value == found[1].labels[name]["auc"].value
        losses = [figures.labels[name]["log_loss"].value for figures in found]
        assert means.labels[name]["log_loss"].value == pytest.approx((2 * losses[0] + 3 * losses[1]) / 5)
    assert means.labels["clicked"]["auc"].value != means.labels["bought"]["auc"].value
    until = over_periods(tmp_path, features, last=5)
    assert until is not None
    assert (until.rows, "auc" in until.labels["clicked"]) == (2, False)
    assert over_periods(tmp_path, features, last=0) is None


@pytest.mark.parametrize("rate", [0.5, 0.1])
@pytest.mark.parametrize("metric", [normalised_entropy, calibration, auc])
def test_the_interval_of_a_metric_is_that_of_a_bootstrap(metric: Any, rate: float) -> None:
    draw = np.random.default_rng(3)
    logits = draw.normal(np.log(rate / (1 - rate)), 1.0, 1500)
    labels = (draw.random(1500) < 1 / (1 + np.exp(-logits))).astype(float)
    figure = figures_of(Scored(labels[:, None], logits[:, None]), ["clicked"], ()).labels["clicked"][metric.__name__]
    again = (draw.integers(0, 1500, 1500) for _ in range(800))
    spread = np.std([metric(labels[rows], logits[rows]) for rows in again])
    assert figure.standard_error == pytest.approx(spread, rel=0.1)


def test_rows_weigh_in_the_metrics_of_a_run_as_in_its_loss(clicks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [json.loads(line) for line in (clicks / "clicks.jsonl").read_text().splitlines()]
    weighted = "".join(json.dumps({**row, "w": 1 + n % 3}) + "\n" for n, row in enumerate(rows))
    (clicks / "clicks.jsonl").write_text(weighted)
    done = run(clicks, ranking_job(ranking={"weight": "w"}))
    held_out = done.prepared.task.held_out
    weights = held_out.batch(np.arange(len(held_out))).weights
    event = [event for event in done.folder.read_events() if "log_loss" in event][-1]
    assert event["log_loss"] * weights.sum() == pytest.approx(event["loss"] * len(held_out), rel=1e-6)
    assert main(["eval", "run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["log_loss"] == pytest.approx(event["log_loss"], rel=1e-6)
    (clicks / "again.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[-60:]))
    assert main(["eval", "run", "again.jsonl", "--json"]) == 0
    unweighted = json.loads(capsys.readouterr().out)["log_loss"]
    assert unweighted != pytest.approx(event["log_loss"], rel=1e-4)


def test_the_error_of_a_mean_over_groups_is_that_of_the_groups() -> None:
    draw = np.random.default_rng(0)
    labels, logits, groups = (draw.random(60) < 0.4).astype(float), draw.normal(size=60), np.repeat(np.arange(12), 5)
    figure = figures_of(Scored(labels[:, None], logits[:, None], groups), ["label"], (2,)).labels["label"]["ndcg@2"]
    values = ndcg(labels, logits, groups, 2).values
    assert figure.value == pytest.approx(values.mean())
    assert figure.standard_error == pytest.approx(values.std(ddof=1) / np.sqrt(len(values)))


def test_intervals_are_within_the_range_of_their_metric() -> None:
    labels, groups = np.array([1, 0, 0, 1, 1, 0, 0, 1, 1, 0]), np.repeat([0, 1, 2], [3, 4, 3])
    logits = np.where(labels > 0, 1.0, -1.0)
    logits[[0, 1]] = -2.0, 8.0  # in the first group a positive row is the last
    found = figures_of(Scored(labels[:, None], logits[:, None], groups), ["label"], (1, 3)).labels["label"]
    clipped = 0
    for name, figure in found.items():
        low, high = (figure.as_json()[end] for end in ("low", "high"))
        assert low is not None and high is not None and figure.standard_error is not None
        largest = np.inf if name in ("log_loss", "calibration", "normalised_entropy") else 1.0
        half = 1.96 * figure.standard_error
        assert (low, high) == (max(0.0, figure.value - half), min(largest, figure.value + half)), name
        clipped += (low == 0.0) + (high == 1.0)
    assert clipped > 4


def test_slices_are_of_each_label() -> None:
    random = np.random.default_rng(0)
    labels, logits = random.integers(0, 2, (40, 2)), random.normal(size=(40, 2))
    device = np.array(["phone", "desktop"])[random.integers(0, 2, 40)]
    names = ["clicked", "bought"]
    found = figures_of(Scored(labels, logits, slices={"device": device}), names, []).as_json()
    for number, name in enumerate(names):
        for value in ("phone", "desktop"):
            there = device == value
            own = Scored(labels[there][:, [number]], logits[there][:, [number]])
            expected = figures_of(own, [name], []).as_json()["labels"][name]
            assert found["slices_by_label"][name]["device"][value] == expected
    assert found["slices"] == found["slices_by_label"]["clicked"] != found["slices_by_label"]["bought"]
    one = figures_of(Scored(labels[:, :1], logits[:, :1], slices={"device": device}), names[:1], []).as_json()
    assert one["slices"] == found["slices"] and "slices_by_label" not in one


def test_a_label_given_another_is_measured_where_that_is_positive() -> None:
    random = np.random.default_rng(0)
    labels, logits = random.integers(0, 2, (60, 2)), random.normal(size=(60, 3))
    labels[:, 1] &= labels[:, 0]
    device = np.where(labels[:, 0] > 0, "phone", "desktop")  # no row of the desktop has a click
    names = ["clicked", "bought", "bought given clicked"]
    found = figures_of(Scored(labels, logits, slices={"device": device}), names, [])
    clicked = labels[:, 0] > 0
    expected = figures_of(Scored(labels[clicked, 1:], logits[clicked, 2:]), ["bought"], [])
    assert found.labels[names[2]] == expected.labels["bought"]
    assert found.slices[names[2]]["device"] == {"desktop": {}, "phone": expected.labels["bought"]}
    assert found.means == figures_of(Scored(labels, logits[:, :2]), names[:2], []).means


def test_rows_without_a_group_are_in_no_metric_of_groups(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    users = [None if n % 3 == 0 else n % 5 for n in range(60)]  # user 0 is a user like any other
    rows = [
        {"label": int(label), "user_id": user} for label, user in zip(random.integers(0, 2, 60), users, strict=True)
    ]
    rows += [{"label": n % 2, "user_id": None} for n in range(7)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    log = open_log([SourceBlock(path="log.jsonl")], RankingBlock(), tmp_path, held_out=[], fraction=0.1)
    logits = random.normal(size=(60, 1))
    kept = np.array([user is not None for user in users])
    scored = scored_rows(log.training.part(0, 60), logits)
    found = figures_of(scored, ["label"], [2]).means
    expected = figures_of(Scored(scored.labels[kept], logits[kept], np.array(users)[kept]), ["label"], [2]).means
    for name in ("grouped_auc", "ndcg@2", "recall@2"):
        assert found[name] == pytest.approx(expected[name], rel=1e-12)
    assert found["auc"] != pytest.approx(expected["auc"])
    assert log.held_out is not None
    assert "ndcg@2" not in figures_of(scored_rows(log.held_out, np.zeros((7, 1))), ["label"], [2]).means


def test_items_are_the_values_of_the_first_feature(clicks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    block = {"model": "two-tower", "item": ["device", "item_id"]}
    warning = "`item` begins with device of 2 values, and item_id has 20: retrieval metrics rank the values of device"
    ran = run(clicks, ranking_job(ranking=block))
    assert warning in ran.prepared.facts["warnings"]
    assert main(["data", "job.yaml"]) == 0
    assert f"warning: {warning}; write the item's id first" in capsys.readouterr().out
    assert main(["eval", "run"]) == 0
    shown = capsys.readouterr().out
    assert "retrieval ranks 2 items by device" in shown and "so there are no retrieval metrics" in shown


def test_other_rows_come_after_the_held_out_ones(clicks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [json.loads(line) for line in (clicks / "clicks.jsonl").read_text().splitlines()]
    rows[-1]["item_id"] = "late"
    for name, some in (("clicks.jsonl", rows), ("tomorrow.jsonl", rows[120:-1])):
        (clicks / name).write_text("".join(json.dumps(row) + "\n" for row in some))
    block = {"model": "two-tower", "item": ["item_id"], "at": [3]}
    run(clicks, ranking_job(ranking=block, evaluate={"fraction": 0.5}))
    found = []
    for data in ([], ["tomorrow.jsonl"]):
        assert main(["eval", "run", *data, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert [values["items"] for values in found] == [21, 21]
    assert ["retrieval_recall@3" in values for values in found] == [True, False]  # nothing of tomorrow's is new


def test_two_towers_are_measured_by_what_they_find(clicks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [json.loads(line) for line in (clicks / "clicks.jsonl").read_text().splitlines()]
    for row in rows[3::7]:
        row["user_id"] = None
    (clicks / "clicks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    block = {"model": "two-tower", "item": ["item_id"], "at": [3]}
    ran = run(clicks, ranking_job(ranking=block, steps=20, evaluate={"every": 20, "fraction": 0.5}))
    assert main(["eval", "run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    task = ran.prepared.task
    assert isinstance(task, RankingTask)
    assert task.held_out is not None
    before, after = rows[:120], rows[120:]
    task.tables.eval()
    recalls, gains = [], []
    with torch.no_grad(), in_float64():
        for user in sorted({row["user_id"] for row in after} - {None}):
            seen = {row["item_id"] for row in before if row["user_id"] == user}
            wanted = {row["item_id"] for row in after if row["user_id"] == user and row["clicked"]} - seen
            first = next(n for n, row in enumerate(after) if row["user_id"] == user)
            others = sorted({row["item_id"] for row in rows} - seen)
            part = task.part_of(task.held_out, np.array([first] * len(others))).inputs
            assert isinstance(part, RankingBatch)
            ids = {**part.ids, "item_id": JaggedIds.single(torch.tensor([id_of(item) for item in others]))}
            inputs = task.inputs_of(replace(part, ids=ids))
            scores = task.model(inputs)[:, 0].tolist()
            best = [item for _, item in sorted(zip(scores, others, strict=True), reverse=True)][:3]
            if wanted:
                recalls.append(len(wanted & set(best)) / len(wanted))
                ideal = sum(1 / np.log2(n + 2) for n in range(min(3, len(wanted))))
                gains.append(sum(1 / np.log2(n + 2) for n, item in enumerate(best) if item in wanted) / ideal)
    assert found["retrieval_recall@3"] == pytest.approx(np.mean(recalls))
    assert found["retrieval_ndcg@3"] == pytest.approx(np.mean(gains))
    assert (found["items"], found["items_by"]) == (20, "item_id")
