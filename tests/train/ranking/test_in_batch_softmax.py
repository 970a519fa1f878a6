"""The in-batch softmax of two towers against its formula, over processes, and from the job to the answers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click_logs import CONSTANT, ranking_job
from running import assert_same_state, run, stop_at, write_job
from safetensors.torch import load_file
from steps_in_layout import steps_in_layout

from stoker.checkpoint.dcp_store import Store
from stoker.cli.main import main
from stoker.job.load_job import JobError, load_job
from stoker.launch.process_pool import Pool
from stoker.models.ranking.item_frequencies import ItemFrequencies
from stoker.models.ranking.two_tower import TwoTower
from stoker.online_store.row_reader import RowReader
from stoker.parallel.float64_mode import in_float64
from stoker.train.prepare import prepare
from stoker.train.prepared import Prepared
from stoker.train.ranking.ranking_scorer import RowScores, StoredScorer
from stoker.train.ranking.ranking_task import RankingBatch, RankingTask
from stoker.train.task import Part

BLOCK = {"model": "two-tower", "item": ["item_id"], "loss": "in-batch-softmax", "weight": "price"}


def job(**changes: Any) -> dict[str, Any]:
    block = {**BLOCK, **changes.pop("ranking", {})}
    return ranking_job(ranking=block, train=CONSTANT | changes.pop("train", {}), **changes)


def prepared_task(path: Path, **block: Any) -> tuple[RankingTask, TwoTower]:
    write_job(path, job(ranking=block))
    task = prepare(load_job(path / "job.yaml", []), path).task
    assert isinstance(task, RankingTask) and isinstance(task.model, TwoTower)
    return task, task.model


def formula(task: RankingTask, tower: TwoTower, part: Any, gaps: dict[int, float]) -> torch.Tensor:
    """The loss of a step row by row: equations 3 to 5 of the paper, weighted."""
    batch = part.inputs
    assert isinstance(batch, RankingBatch)
    inputs = task.inputs_of(batch)
    users, items = tower.user_vectors(inputs), tower.item_vectors(inputs)
    ids = batch.ids["item_id"].ids.tolist()
    total = torch.zeros((), dtype=torch.float64)
    for row, item in enumerate(ids):
        if batch.labels[row, 0]:
            candidates = [n for n, other in enumerate(ids) if n == row or other != item]
            logits = torch.stack(
                [users[row] @ items[n] * tower.log_scale.exp()[0] + math.log(gaps.get(ids[n], 1.0)) for n in candidates]
            )
            own = logits[candidates.index(row)]
            total = total + batch.weights[row] * (logits.logsumexp(0) - own)
    return total


@pytest.mark.parametrize("logq", [True, False])
def test_losses_and_gradients_are_those_of_the_formula(logq: bool, clicks: Path) -> None:
    task, tower = prepared_task(clicks, logq={"rate": 0.25} if logq else {"enabled": False})
    gaps: dict[int, float] = {}
    last: dict[int, int] = {}
    with in_float64():
        for step in range(1, 9):
            part = task.parts(12 * (step - 1), 12 * step)[0]
            for item in set(part.inputs.ids["item_id"].ids.tolist()) if logq else ():  # type: ignore[attr-defined]
                passed = step - last.get(item, 0)
                gaps[item] = 0.75 * gaps[item] + 0.25 * passed if item in gaps else float(passed)
                last[item] = step
            parameters = [*tower.user.parameters(), *tower.item.parameters(), tower.log_scale]
            loss = task.loss(part).total
            expected = formula(task, tower, part, gaps)
            assert float(loss) == pytest.approx(float(expected), rel=1e-12) and float(loss) > 0
            for one, other in zip(
                torch.autograd.grad(loss, parameters), torch.autograd.grad(expected, parameters), strict=True
            ):
                torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    assert max(gaps.values(), default=2.0) > 1.0  # else the correction is the same for all items


def test_rows_without_an_item_are_no_candidates(clicks: Path) -> None:
    lines = [json.loads(line) for line in (clicks / "clicks.jsonl").read_text().splitlines()]
    for row in lines[::3]:
        del row["item_id"]
    (clicks / "clicks.jsonl").write_text("\n".join(map(json.dumps, lines)))
    task, tower = prepared_task(clicks)
    with in_float64():
        positions = np.arange(12)
        part = task.part_of(task.log.training, positions)
        whole = task.loss(part).total
        items = set(part.inputs.ids["item_id"].ids.tolist())  # type: ignore[attr-defined]
        assert tower.frequencies is not None and int((tower.frequencies.last > 0).sum()) == len(items)
        task, _ = prepared_task(clicks)
        fewer = task.loss(task.part_of(task.log.training, positions[positions % 3 > 0])).total
        nothing = task.loss(task.nothing()).total
    assert float(whole) == pytest.approx(float(fewer), rel=1e-12) and float(whole) > 0
    assert float(nothing) == 0


def test_the_gap_of_an_item_approaches_the_mean_of_its_gaps() -> None:
    frequencies, random = ItemFrequencies(cells=7, rate=0.02), np.random.default_rng(0)
    chances = np.array([0.9, 0.5, 0.1])
    for _ in range(4000):
        frequencies.update(torch.from_numpy(np.flatnonzero(random.random(3) < chances)))
    found = frequencies.log_probabilities(torch.arange(3)).exp()
    np.testing.assert_allclose(found, chances, rtol=0.35)
    assert float(frequencies.log_probabilities(torch.tensor([5]))) == pytest.approx(-math.log(4000))  # never seen


EPOCH = ("steps=", "epochs=1")


@pytest.mark.parametrize(
    ("world", "overrides"), [(2, ()), (3, ()), (2, ("parallel.shard=zero3",))], ids=["2", "3", "zero3"]
)
@pytest.mark.often("2", then="slow")
def test_processes_compute_what_one_does(world: int, overrides: tuple[str, ...], clicks: Path, pool: Pool) -> None:
    lines = (clicks / "clicks.jsonl").read_text().splitlines()
    (clicks / "clicks.jsonl").write_text("\n".join(lines[:90]))  # the last step has fewer rows than others
    write_job(clicks, job(output="one"))
    alone = steps_in_layout(str(clicks), 6, EPOCH)
    write_job(clicks, job(output="many"))
    layout = (*EPOCH, f"parallel.data={world}", *overrides)
    many = pool.run(steps_in_layout, str(clicks), 6, layout, world=world)
    assert many[0] == pytest.approx(alone, rel=1e-12) and len(alone) > 6
    one, several = (Store(clicks / name / "checkpoints").load(6).tensors for name in ("one", "many"))
    for name in (name for name in one if "frequencies" in name):
        torch.testing.assert_close(one[name], several[name], rtol=0, atol=0)


def test_a_stopped_run_goes_on_as_if_it_had_not(clicks: Path) -> None:
    whole = run(clicks, job(output="whole"))
    stopped = run(clicks, job(), before=stop_at(30))
    assert stopped.outcome.step < 6
    resumed = run(clicks, job())
    assert resumed.losses == whole.losses
    assert_same_state(resumed.last_state(), whole.last_state())
    assert any("frequencies" in name for name in whole.last_state().tensors)


def test_a_step_that_is_not_finite_counts_no_items(clicks: Path) -> None:
    def spoil(prepared: Prepared) -> None:
        parts = prepared.task.parts

        def spoilt(first: int, last: int) -> list[Part]:
            found = parts(first, last)
            if first == 12:
                found[0].inputs.weights.mul_(math.nan)  # type: ignore[attr-defined]
            return found

        prepared.task.parts = spoilt  # type: ignore[method-assign]

    faults = {"restarts": 0, "check": False, "not_finite": "skip"}
    ran = run(clicks, job(faults=faults, checkpoint={"every": 1, "keep": 9, "memory": 0}), before=spoil)
    before, after, later = (ran.store.load(step).tensors for step in (1, 2, 3))
    for name in (name for name in before if "frequencies" in name):
        assert torch.equal(before[name], after[name])  # type: ignore[arg-type]
        assert not torch.equal(after[name], later[name])  # type: ignore[arg-type]


def test_scores_are_no_probabilities_from_the_evaluation_to_the_export(
    clicks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = run(clicks, job())
    assert ran.loop.evaluation is not None and "auc" in ran.loop.evaluation.measures
    capsys.readouterr()
    assert main(["eval", "run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["log_loss"] is None and found["calibration"] is None and found["loss"] is None
    assert found["grouped_auc"] > 0 and found["retrieval_recall@10"] > 0
    assert main(["export", "run", "--format", "ranking", "--to", "exported"]) == 0
    row = json.loads((clicks / "clicks.jsonl").read_text().splitlines()[0])
    scorer = StoredScorer(RowReader(str(clicks / "exported")))
    [answer] = scorer.score([[row]])
    assert isinstance(answer, RowScores)
    assert not answer.probabilities and answer.scores is answer.logits
    weights = load_file(clicks / "exported" / "tower.safetensors")
    assert not [name for name in weights if name.startswith("frequencies")]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"ranking": {"model": "dlrm", "item": []}}, "needs a vector of the user and one of the item"),
        ({"train": {"micro_batch": 4}}, "a step has 3 passes"),
        ({"ranking": {"loss": "cross-entropy", "logq": {"rate": 0.1}}}, "no effect with `loss: cross-entropy`"),
        ({"ranking": {"logq": {"enabled": False, "cells": 9}}}, "no effect with `logq.enabled: false`"),
    ],
    ids=["model", "accumulation", "loss", "logq"],
)
def test_what_has_no_effect_is_refused(changes: dict[str, Any], says: str, clicks: Path) -> None:
    write_job(clicks, job(**changes))
    with pytest.raises(JobError, match=says):
        load_job(clicks / "job.yaml", [])
