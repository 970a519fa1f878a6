"""Losses of ``task: ranking`` against a plain loop, and over processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from click_logs import CONSTANT, ranking_job
from running import run, write_job
from steps_in_layout import steps_in_layout, steps_with_small_parts
from torch import nn

from stoker.job.load_job import load_job
from stoker.launch.process_pool import Pool
from stoker.models.ranking.model_inputs import RankingInputs
from stoker.parallel.float64_mode import in_float64
from stoker.sparse.jagged_ids import JaggedIds
from stoker.sparse.sparse_embeddings import Feature, SparseEmbeddings
from stoker.sparse.table_settings import TableSettings
from stoker.train.engine import Totals
from stoker.train.evaluate import evaluate
from stoker.train.prepare import prepare
from stoker.train.ranking.prepare_ranking import step_hook
from stoker.train.ranking.ranking_task import RankingBatch, RankingTask
from stoker.train.task import Part

MODELS = ["dlrm", "dcn", "deepfm", "wide-deep", "din", "mmoe", "ple", "esmm", "two-tower"]
OF_LABELS = {"label": ["clicked", "bought"], "ignore": []}


def plain_losses(task: RankingTask, steps: int, batch: int, lr: float, table_lr: float) -> list[float]:
    """Trains in a plain loop: nn.Embedding and SGD for the tables, AdamW for the tower; returns the losses."""
    features = task.log.features.ids
    everything = task.part_of(task.log.training, np.arange(len(task.log.training))).inputs
    assert isinstance(everything, RankingBatch)
    weights, number = {}, {}
    task.tables.eval()  # initial values are drawn when an id is first trained on
    for column in features:
        ids = everything.ids[column.name].ids.unique()
        number[column.name] = {int(i): n for n, i in enumerate(ids)}
        fresh = SparseEmbeddings(
            [TableSettings(column.table, task.shape.width_of(column.name), dtype="float64")],
            {"x": Feature(column.table)},
            seed=task.seed,
        )
        weights[column.name] = nn.Parameter(fresh({"x": JaggedIds.single(ids)})["x"].detach())
    task.tables.train()
    tower = torch.optim.AdamW(task.model.parameters(), lr=lr, weight_decay=0.0)
    rows = torch.optim.SGD(weights.values(), lr=table_lr)
    losses = []
    for step in range(steps):
        part = task.parts(batch * step, batch * (step + 1))[0].inputs
        assert isinstance(part, RankingBatch)
        vectors = {}
        for column in features:
            found = part.ids[column.name]
            at = torch.tensor([number[column.name][int(i)] for i in found.ids], dtype=torch.int64)
            scales = torch.ones(len(at), dtype=torch.float64) if found.weights is None else found.weights
            bag = torch.repeat_interleave(torch.arange(batch), found.lengths)
            summed = torch.zeros(batch, task.shape.width_of(column.name), dtype=torch.float64)
            summed = summed.index_add(0, bag, weights[column.name][at] * scales[:, None])
            mean = column.kind in ("ids", "sequence") and not column.weighted
            vectors[column.name] = summed / found.lengths.clamp(min=1)[:, None] if mean else summed
        logits = task.model(RankingInputs(vectors, {}, part.dense))
        labels = part.labels.shape[1]  # `esmm` has a further logit without a loss
        loss = nn.functional.binary_cross_entropy(logits[:, :labels].sigmoid(), part.labels)
        tower.zero_grad()
        rows.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(task.model.parameters(), 1.0)
        tower.step()
        rows.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize(("micro_batch", "model"), [(12, "dlrm"), (4, "dlrm"), (12, "dcn")])
def test_embeddings_of_several_widths_are_a_plain_loop_over_theirs(micro_batch: int, model: str, clicks: Path) -> None:
    features = [{"name": "user_id", "width": 6}, {"name": "tags", "width": 3}, {"name": "item_id", "width": 4}]
    block = {"ignore": ["bought", "item_history"], "table": {"optimizer": "sgd", "lr": 0.3}, "features": features}
    ran = run(clicks, ranking_job(ranking={**block, "model": model}, train={**CONSTANT, "micro_batch": micro_batch}))
    fresh = prepare(ran.loaded, clicks).task
    assert isinstance(fresh, RankingTask)
    widths = {table.name: table.width for table in fresh.tables.tables}
    assert widths == {"user_id": 6, "item_id": 4, "tags": 3, "device": 4}
    with in_float64():
        expected = plain_losses(fresh, 6, 12, 1e-2, 0.3)
    assert ran.losses == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("micro_batch", [12, 4])
def test_a_run_is_a_plain_loop_over_embeddings(micro_batch: int, clicks: Path) -> None:
    train = {"batch": 12, "lr": 1e-2, "precision": "fp64", "warmup": 0, "schedule": "constant"}
    table = {"optimizer": "sgd", "lr": 0.3}
    block = {"ignore": ["bought", "item_history"], "table": table}
    ran = run(clicks, ranking_job(ranking=block, train={**train, "micro_batch": micro_batch}))
    torch.manual_seed(0)
    fresh = prepare(ran.loaded, clicks).task
    assert isinstance(fresh, RankingTask)
    with in_float64():
        expected = plain_losses(fresh, 6, 12, 1e-2, 0.3)
    assert ran.losses == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.often("dlrm", "two-tower", then="slow")
def test_every_model_learns(model: str, clicks: Path) -> None:
    block = {"model": model, "item": ["item_id"] if model == "two-tower" else []}
    if model in ("mmoe", "ple", "esmm"):
        block |= OF_LABELS
    ran = run(clicks, ranking_job(ranking={**block, "table": {"lr": 0.4}}, steps=60, evaluate={"every": 60}))
    assert np.mean(ran.losses[-15:]) < np.mean(ran.losses[:15]) - 0.05
    found = ran.loop.evaluation
    assert found is not None
    assert found.measures["log_loss"] == pytest.approx(found.loss, rel=1e-9)


@pytest.mark.parametrize(
    ("world", "overrides"),
    [(2, ()), (3, ()), (2, ("parallel.shard=zero3",)), (2, ("train.micro_batch=2",))],
    ids=["2", "3", "zero3", "accumulation"],
)
@pytest.mark.often("2", "zero3", then="slow")
def test_processes_compute_what_one_does(world: int, overrides: tuple[str, ...], clicks: Path, pool: Pool) -> None:
    model = {"model": "deepfm", "features": [{"name": "item_id", "width": 6}]}
    write_job(clicks, ranking_job(ranking=model, output="one"))
    alone = steps_in_layout(str(clicks), 6, ())
    write_job(clicks, ranking_job(ranking=model, output="many"))
    many = pool.run(steps_in_layout, str(clicks), 6, (f"parallel.data={world}", *overrides), world=world)
    assert many[0] == pytest.approx(alone, rel=1e-12)
    assert len(alone) == 6 + 3


@pytest.mark.parametrize("model", ["ple", "esmm"])
def test_processes_train_several_labels_as_one_does(model: str, clicks: Path, pool: Pool) -> None:
    block = {"model": model, **OF_LABELS}
    write_job(clicks, ranking_job(ranking=block, output="one"))
    alone = steps_in_layout(str(clicks), 6, ())
    write_job(clicks, ranking_job(ranking=block, output="many"))
    overrides = ("parallel.data=2", "parallel.shard=zero3", "train.micro_batch=2")
    assert pool.run(steps_in_layout, str(clicks), 6, overrides, world=2)[0] == pytest.approx(alone, rel=1e-12)


@pytest.mark.parametrize("model", ["ple", "esmm"])
def test_several_labels_are_a_plain_loop_over_embeddings(model: str, clicks: Path) -> None:
    block = {"model": model, "label": ["clicked", "bought"], "ignore": ["item_history"]}
    ran = run(clicks, ranking_job(ranking={**block, "table": {"optimizer": "sgd", "lr": 0.3}}, train=CONSTANT))
    fresh = prepare(ran.loaded, clicks).task
    assert isinstance(fresh, RankingTask)
    with in_float64():
        expected = plain_losses(fresh, 6, 12, 1e-2, 0.3)
    assert ran.losses == pytest.approx(expected, rel=1e-12)


def test_processes_evaluate_parts_of_their_own_a_few_at_a_time(clicks: Path, pool: Pool) -> None:
    write_job(clicks, ranking_job(output="one"))
    alone = steps_in_layout(str(clicks), 3, ())
    write_job(clicks, ranking_job(output="small"))
    assert steps_with_small_parts(str(clicks), 3, ()) == pytest.approx(alone, rel=1e-12)
    write_job(clicks, ranking_job(output="many"))
    many = pool.run(steps_with_small_parts, str(clicks), 3, ("parallel.data=2",), world=2)
    assert many[0] == pytest.approx(alone, rel=1e-12)


def test_an_evaluation_has_few_parts_in_memory(monkeypatch: pytest.MonkeyPatch, clicks: Path) -> None:
    write_job(clicks, ranking_job())
    prepared = prepare(load_job(clicks / "job.yaml", []), clicks)
    task = prepared.task
    assert isinstance(task, RankingTask)
    monkeypatch.setattr("stoker.train.ranking.ranking_task.EVALUATION_SAMPLES", 1)
    made, most = 0, 0
    held_out = task.held_out
    assert held_out is not None

    def counted(parts: Iterator[Part]) -> Iterator[Part]:
        nonlocal made
        for part in parts:
            made += 1
            yield part

    def evaluated(parts: Sequence[Part]) -> Totals:
        nonlocal made, most
        made, most = 0, max(most, made)
        return Totals(1.0, None, len(parts))

    monkeypatch.setattr("stoker.train.evaluate.TOGETHER", 8)
    monkeypatch.setattr(prepared.engine, "evaluate", evaluated)
    found = evaluate(task, prepared.engine, counted(task._parts_of(held_out)))
    assert found is not None
    assert most == 8
    assert found.targets == len(held_out) == 60
    others = [part for part in task._parts_of(held_out, 1, 3) if part.inputs is None]
    assert len(others) == 40  # which are not built


def test_a_step_that_is_not_finite_leaves_the_rows_alone() -> None:
    tables = SparseEmbeddings([TableSettings("t", 2)], {"x": Feature("t")}, seed=0)
    ids = {"x": JaggedIds.single(torch.tensor([1, 2]))}
    hook = step_hook(lambda: tables, 1.0)
    before = tables(ids)["x"]
    (before * torch.nan).sum().backward()
    assert torch.isnan(hook.after_passes(1, torch.tensor(1.0)))
    hook.after_optimizer(1.0, False)
    after = tables(ids)["x"]
    assert torch.equal(after, before)
    after.sum().backward()
    assert hook.after_passes(2, torch.tensor(1.0)) == 1.0
    hook.after_optimizer(0.5, True)
    assert not torch.equal(tables(ids)["x"], before)


def test_the_tables_count_the_steps_of_the_run() -> None:
    tables = SparseEmbeddings([TableSettings("t", 2)], {"x": Feature("t")}, seed=0)
    hook = step_hook(lambda: tables, 1.0)
    for step, taken in ((1, True), (2, False), (2, True), (3, False), (4, True)):  # 2 is repeated, 3 is skipped
        hook.before_passes(step)
        assert tables.version == step - 1
        tables({"x": JaggedIds.single(torch.tensor([1, 2]))})["x"].sum().backward()
        hook.after_optimizer(1.0, taken)
    assert tables.version == 4
