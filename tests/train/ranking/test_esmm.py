"""``ranking.model: esmm``: clicks, and conversions that only follow them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click_logs import ranking_job
from running import run, write_job

from stoker.cli.main import main
from stoker.errors import UserError
from stoker.job.load_job import load_job
from stoker.serve.ranking_server import open_scorers
from stoker.train.prepare import prepare
from stoker.train.ranking.ranking_scorer import RowScores

ESMM = {"model": "esmm", "label": ["clicked", "bought"], "ignore": []}
OUTPUTS = ["clicked", "bought", "bought given clicked"]


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def scores(home: Path, name: str, rows: list[dict[str, Any]]) -> RowScores:
    [scorer] = open_scorers([name], home, at="last", trusted=(), cache_rows=100, cache_seconds=1.0).values()
    [answer] = scorer.score([rows])
    assert isinstance(answer, RowScores)
    return answer


def test_each_output_is_measured_exported_and_served_by_its_name(
    clicks: Path, in_process_replay: None, capsys: pytest.CaptureFixture[str]
) -> None:
    write_job(clicks, ranking_job(ranking=ESMM))
    assert main(["train", "job.yaml"]) == 0
    for place in ("folder", "lmdb://store"):
        assert main(["export", "run", "--format", "ranking", "--to", place]) == 0
    capsys.readouterr()
    assert main(["eval", "run", "--json"]) == 0
    found, held_out = json.loads(capsys.readouterr().out), rows_of(clicks / "clicks.jsonl")[180:]
    clicked = np.array([row["clicked"] > 0 for row in held_out])
    assert list(found["labels"]) == OUTPUTS
    rate = found["labels"]["bought given clicked"]["positive_rate"]["value"]
    assert rate == pytest.approx(np.mean([row["bought"] for row in held_out if row["clicked"]]))
    of_labels = [found["labels"][name]["log_loss"]["value"] for name in OUTPUTS[:2]]
    assert found["loss"] == pytest.approx(np.mean(of_labels))

    ours = scores(clicks, "run", held_out)
    for place in ("folder", "lmdb://store"):
        exported = scores(clicks, place, held_out)
        assert list(exported.outputs) == OUTPUTS and np.abs(ours.logits - exported.logits).max() < 1e-12
    assert ours.scores[:, 1] == pytest.approx(ours.scores[:, 0] * ours.scores[:, 2], rel=1e-9)
    given = found["labels"]["bought given clicked"]["calibration"]["value"]
    assert ours.scores[clicked, 2].mean() / rate == pytest.approx(given)
    manifest = json.loads((clicks / "folder" / "manifest.json").read_text())
    assert manifest["outputs"] == OUTPUTS


def test_periods_have_each_output_and_means_over_the_labels(clicks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = {key: value for key, value in ranking_job().items() if key not in ("steps", "evaluate")}
    write_job(clicks, {**whole, "ranking": {**whole["ranking"], **ESMM, "progressive": True}, "epochs": 1})
    assert main(["train", "job.yaml"]) == 0
    capsys.readouterr()
    assert main(["eval", "run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["labels"]) == OUTPUTS
    assert found["loss"] == pytest.approx(np.mean([found["labels"][n]["log_loss"]["value"] for n in OUTPUTS[:2]]))


def test_a_conversion_without_a_click_is_left_out_and_counted(clicks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of(clicks / "clicks.jsonl")
    for row in rows[:5]:
        row |= {"clicked": 0, "bought": 1}
    write_rows(clicks / "clicks.jsonl", rows)
    path = write_job(clicks, ranking_job(ranking=ESMM))
    prepared = prepare(load_job(path), clicks)
    assert "conversion without a click (5)" in prepared.facts["dropped"]
    assert main(["data", "job.yaml"]) == 0
    assert "bought is positive and clicked is not" in capsys.readouterr().out
    prepare(load_job(write_job(clicks, ranking_job(ranking={**ESMM, "model": "mmoe"}))), clicks)  # which keeps them


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"label": "clicked", "ignore": ["bought"]}, "needs two labels, a click and the conversion that follows it"),
        ({"label": ["clicked", "bought", "device"]}, "needs two labels"),
        ({"label": ["bought", "clicked"]}, "more than max_dropped: conversion without a click"),
    ],
)
def test_other_labels_are_refused_at_their_place(changes: dict[str, Any], message: str, clicks: Path) -> None:
    path = write_job(clicks, ranking_job(ranking={**ESMM, **changes}))
    with pytest.raises(UserError) as error:
        prepare(load_job(path), clicks)
    assert message in str(error.value) and "job.yaml:" in str(error.value)


def test_labels_in_the_wrong_order_are_refused_although_few_rows_contradict_them(clicks: Path) -> None:
    rows = rows_of(clicks / "clicks.jsonl")
    contradictory = [n for n, row in enumerate(rows) if row["clicked"] > row["bought"]]
    write_rows(clicks / "clicks.jsonl", [row for n, row in enumerate(rows) if n not in contradictory[9:]])
    job = ranking_job(ranking={**ESMM, "label": ["bought", "clicked"]})
    with pytest.raises(UserError, match=r"job\.yaml:.*in which bought is 1.*the click before that of the conversion"):
        prepare(load_job(write_job(clicks, job)), clicks)


ITEMS = 150


def write_biased_log(path: Path) -> np.ndarray:
    """Shown items, of which those that are clicked more are also bought more; returns each item's pCVR."""
    random = np.random.default_rng(0)
    quality = random.normal(size=ITEMS)
    click, given = (1 / (1 + np.exp(-(slope * quality + bias))) for slope, bias in ((1.5, -2.0), (1.5, -0.5)))
    items = random.integers(0, ITEMS, 5000)
    clicked = random.random(5000) < click[items]
    bought = clicked & (random.random(5000) < given[items])
    pairs = enumerate(zip(items, clicked, bought, strict=True))
    rows = [{"item_id": f"i{i}", "clicked": int(c), "bought": int(b), "timestamp": n} for n, (i, c, b) in pairs]
    write_rows(path, rows)
    return given


def test_conversion_rates_of_all_items_are_nearer_the_truth_than_those_of_a_tower_of_the_clicked_rows(
    tmp_path: Path,
) -> None:
    truth = write_biased_log(tmp_path / "clicks.jsonl")
    write_rows(tmp_path / "clicked.jsonl", [row for row in rows_of(tmp_path / "clicks.jsonl") if row["clicked"]])
    train = {"batch": 128, "lr": 1e-2, "warmup": 0, "schedule": "constant"}
    common = {"width": 8, "hidden": [16], "table": {"lr": 0.1}}
    alone = {"label": "bought", "ignore": ["clicked"], "model": "mmoe", "experts": 1}  # one tower
    run(tmp_path, ranking_job(ranking={**common, **ESMM}, steps=100, train=train, output="entire", evaluate={}))
    job = ranking_job(ranking={**common, **alone}, steps=100, train=train, output="clicked", evaluate={})
    run(tmp_path, {**job, "data": "clicked.jsonl"})
    items = [{"item_id": f"i{n}"} for n in range(ITEMS)]
    entire, clicked = scores(tmp_path, "entire", items).scores[:, 2], scores(tmp_path, "clicked", items).scores[:, 0]
    errors = [float(np.abs(found - truth).mean()) for found in (entire, clicked)]
    assert errors[0] < 0.5 * errors[1]
