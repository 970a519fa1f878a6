"""``task: ranking``: against a plain loop, over processes, through checkpoints, and by its verbs."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click_logs import ranking_job
from running import assert_same_state, at_sample, run, stop_at, write_job
from torch import nn

from stoker.checkpoint.rows_by_id import rows_by_id
from stoker.checkpoint.store import BASE_ROWS, Store
from stoker.cli.main import main
from stoker.data.ranking.click_log import open_log
from stoker.data.ranking.column_settings import LogSettings
from stoker.data.ranking.ids import id_of
from stoker.errors import UserError
from stoker.job.layout import layout_of
from stoker.job.load_job import load_job
from stoker.job.schema import SourceBlock
from stoker.launch.process_pool import Pool
from stoker.models.ranking.model_inputs import RankingInputs
from stoker.parallel.float64_mode import in_float64
from stoker.parallel.mesh import Mesh
from stoker.runs.run_folder import RunFolder
from stoker.runs.shared_secret import read_secret
from stoker.sparse.jagged_ids import JaggedIds
from stoker.sparse.servers.row_server import RowServer
from stoker.sparse.sparse_embeddings import Feature, SparseEmbeddings
from stoker.sparse.table_settings import TableSettings
from stoker.sparse.tiered_rows import TieredRows
from stoker.train.prepare import prepare
from stoker.train.ranking.figures import Scored, figures_of
from stoker.train.ranking.open_run import measure_run
from stoker.train.ranking.prepare import step_hook
from stoker.train.ranking.progressive import ValidationPeriod, over_periods, read_periods, write_period
from stoker.train.ranking.ranking_task import RankingBatch, RankingTask, scored_rows
from stoker.train.run import start

MODELS = ["dlrm", "dcn", "deepfm", "wide-deep", "din", "mmoe", "two-tower"]
CONSTANT = {"batch": 12, "lr": 1e-2, "precision": "fp64", "warmup": 0, "schedule": "constant"}


def plain_losses(task: RankingTask, steps: int, batch: int, lr: float, table_lr: float) -> list[float]:
    """The run as a plain loop: nn.Embedding and SGD for the tables, AdamW for the tower."""
    features = task.log.features.ids
    everything = task.part_of(task.log.training, np.arange(len(task.log.training))).inputs
    assert isinstance(everything, RankingBatch)
    weights, number = {}, {}
    task.tables.eval()  # first values are drawn when an id is first trained on, whoever asks
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
        loss = nn.functional.binary_cross_entropy_with_logits(logits, part.labels)
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
def test_every_model_learns(model: str, clicks: Path) -> None:
    block = {"model": model, "item": ["item_id"] if model == "two-tower" else []}
    if model == "mmoe":
        block |= {"label": ["clicked", "bought"], "ignore": []}
    ran = run(clicks, ranking_job(ranking={**block, "table": {"lr": 0.4}}, steps=60, evaluate={"every": 60}))
    assert np.mean(ran.losses[-15:]) < np.mean(ran.losses[:15]) - 0.05
    found = ran.outcome.evaluation
    assert found is not None
    assert found.measures["log_loss"] == pytest.approx(found.loss, rel=1e-9)


def steps_in_layout(path: str, steps: int, overrides: tuple[str, ...]) -> list[float]:
    base = Path(path)
    loaded = load_job(base / "job.yaml", [f"steps={steps}", *overrides])
    layout = layout_of(loaded.job)
    mesh = Mesh(layout, torch.device("cpu")) if layout.world > 1 else None
    prepared = prepare(loaded, base, mesh=mesh)
    folder = RunFolder(base / loaded.job.output)
    folder.path.mkdir(exist_ok=True)
    with in_float64():
        start(prepared, folder, base, quiet=True)
    return [line["loss"] for line in folder.read_metrics()] + [
        event["loss"] for event in folder.read_events() if event["event"] == "evaluated"
    ]


@pytest.mark.parametrize(
    ("world", "overrides"),
    [(2, ()), (3, ()), (2, ("parallel.shard=zero3",)), (2, ("train.micro_batch=2",))],
    ids=["2", "3", "zero3", "accumulation"],
)
def test_processes_compute_what_one_does(world: int, overrides: tuple[str, ...], clicks: Path, pool: Pool) -> None:
    model = {"model": "deepfm", "features": [{"name": "item_id", "width": 6}]}
    write_job(clicks, ranking_job(ranking=model, output="one"))
    alone = steps_in_layout(str(clicks), 6, ())
    write_job(clicks, ranking_job(ranking=model, output="many"))
    many = pool.run(steps_in_layout, str(clicks), 6, (f"parallel.data={world}", *overrides), world=world)
    assert many[0] == pytest.approx(alone, rel=1e-12)
    assert len(alone) == 6 + 3


@pytest.mark.parametrize("rule", [{"age": 3}, {"max_rows": 12, "default_row": "mean"}], ids=str)
def test_a_checkpoint_of_any_processes_is_restored_by_any_other(rule: dict[str, Any], clicks: Path, pool: Pool) -> None:
    table = {"admission": {"count": 2}, "eviction": {"every": 2, **rule}}
    write_job(clicks, ranking_job(output="alone", ranking={"table": table}, train=CONSTANT))
    alone = steps_in_layout(str(clicks), 4, ())
    write_job(clicks, ranking_job(output="changing", ranking={"table": table}, train=CONSTANT))
    for step, world in enumerate((1, 2, 3, 1), start=1):
        found = pool.run(steps_in_layout, str(clicks), step, (f"parallel.data={world}",), world=world)[0]
    assert found[:4] == pytest.approx(alone[:4], rel=1e-12)
    one, other = (Store(clicks / name / "checkpoints").load(4) for name in ("alone", "changing"))
    rows, others = rows_by_id(one.tensors), rows_by_id(other.tensors)
    assert rows.keys() == others.keys()
    assert any(len(tensor) for tensor in rows.values())
    for name, tensor in rows.items():
        torch.testing.assert_close(tensor, others[name], rtol=1e-12, atol=1e-14)


def test_checkpoints_of_changed_rows_are_resumed_evaluated_and_kept(clicks: Path, pool: Pool) -> None:
    table = {"admission": {"count": 2}, "eviction": {"age": 2, "every": 2, "max_rows": 20, "default_row": "mean"}}
    job = ranking_job(output="whole", ranking={"table": table}, train=CONSTANT, checkpoint={"every": 1, "best": False})
    write_job(clicks, job)
    whole = steps_in_layout(str(clicks), 6, ())
    write_job(clicks, {**job, "output": "changed", "checkpoint": {**job["checkpoint"], "full_every": 4}})
    for step, world in ((3, 2), (4, 1), (6, 2)):  # it begins anew with all rows after each
        found = pool.run(steps_in_layout, str(clicks), step, (f"parallel.data={world}",), world=world)[0]
    assert found[:6] == pytest.approx(whole[:6], rel=1e-12)
    store = Store(clicks / "changed" / "checkpoints")
    assert {step: store.numbers(step).get("base") for step in store.steps()} == {5: None, 6: 5}
    one, other = (Store(clicks / name / "checkpoints").load(6) for name in ("whole", "changed"))
    assert any(name.startswith(BASE_ROWS) for name in other.tensors)
    rows, others = rows_by_id(one.tensors), rows_by_id(other.tensors)
    assert rows.keys() == others.keys() and len(rows["user_id/ids"])
    for name, tensor in rows.items():
        torch.testing.assert_close(tensor, others[name], rtol=1e-12, atol=1e-14)
    first, second = (
        measure_run(str(clicks / name), None, "auto", at="last", trusted=(), base=clicks).means
        for name in ("whole", "changed")
    )
    assert first == pytest.approx(second, rel=1e-9)


def test_a_stopped_run_goes_on_as_if_it_had_not(clicks: Path) -> None:
    rules = {
        "admission": {"count": 2, "probability": 0.9},
        "eviction": {"max_rows": 12, "every": 1, "default_row": "mean"},
    }
    table = {**rules, "optimizer": "adam", "lr": 0.01}
    whole = run(clicks, ranking_job(ranking={"table": table}, output="whole"))
    stopped = run(clicks, ranking_job(ranking={"table": table}), before=stop_at(30))
    assert stopped.outcome.step < 6
    resumed = run(clicks, ranking_job(ranking={"table": table}))
    assert resumed.loop.resumed_from == "disk"
    assert resumed.losses == whole.losses
    assert_same_state(resumed.last_state(), whole.last_state())


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
    for step, taken in ((1, True), (2, False), (2, True), (3, False), (4, True)):  # 2 is taken again, 3 is left out
        hook.before_passes(step)
        assert tables.version == step - 1
        tables({"x": JaggedIds.single(torch.tensor([1, 2]))})["x"].sum().backward()
        hook.after_optimizer(1.0, taken)
    assert tables.version == 4


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
    with (clicks / "other.jsonl").open("w") as file:
        file.writelines((clicks / "clicks.jsonl").read_text().splitlines(keepends=True)[:50])
        file.write('{"clicked": "maybe"}\n')
    assert main(["eval", "run", "other.jsonl", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rows_used"], found["rows_dropped"]) == (50, 1)
    assert main(["eval", "run", "other.jsonl"]) == 0
    assert "50 rows; 1 dropped; step 20" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "dlmr"}, "there is no ranking model `dlmr`; write dlrm"),
        ({"model": "two-tower"}, "needs to know which features are the item's"),
        ({"model": "two-tower", "item": ["itm"]}, "itm is no feature with ids"),
        (
            {"ignore": ["bought", "user_id", "item_history", "tags", "price", "device"]},
            "dlrm multiplies pairs of vectors, and there is one: item_id; write `model: deepfm`",
        ),
        ({"model": "din", "ignore": ["item_history"]}, "`model: din` needs a sequence"),
        ({"label": "click"}, "the rows have no column 'click'; did you mean clicked?"),
        ({"features": [{"name": "price", "kind": "buckets", "boundaries": [2.0, 1.0]}]}, "boundaries rise"),
        ({"progressive": True}, "trains on each row once"),
        ({"features": [{"name": "price", "width": 3}]}, "price is no feature with ids, so it has no embedding"),
        (
            {"features": [{"name": "item_id", "width": 3}, {"name": "item_history", "width": 5}]},
            "item_history shares the rows of item_id, which have 3 numbers; write `width: 3`",
        ),
        ({"table": {"eviction": {"age": 9, "score": "recency"}}}, "`score` ranks rows, and nothing says how many"),
        ({"table": {"eviction": {"every": 10}}}, "needs to know which rows go; write `age: 10000` or `max_rows"),
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


def test_evaluations_say_how_many_ids_came_and_went(clicks: Path, pool: Pool) -> None:
    table = {"eviction": {"age": 1, "every": 2}}
    write_job(clicks, ranking_job(output="alone", ranking={"table": table}, train=CONSTANT))
    steps_in_layout(str(clicks), 6, ())
    write_job(clicks, ranking_job(output="two", ranking={"table": table}, train=CONSTANT))
    pool.run(steps_in_layout, str(clicks), 3, ("parallel.data=2",), world=2)
    pool.run(steps_in_layout, str(clicks), 6, ("parallel.data=2",), world=2)  # goes on from the checkpoint
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
    means = over_periods(tmp_path, names)
    assert means is not None
    for name in names:
        assert means.labels[name]["auc"].value == found[1].labels[name]["auc"].value
        losses = [figures.labels[name]["log_loss"].value for figures in found]
        assert means.labels[name]["log_loss"].value == pytest.approx((2 * losses[0] + 3 * losses[1]) / 5)
    assert means.labels["clicked"]["auc"].value != means.labels["bought"]["auc"].value
    until = over_periods(tmp_path, names, last=5)
    assert until is not None
    assert (until.rows, "auc" in until.labels["clicked"]) == (2, False)
    assert over_periods(tmp_path, names, last=0) is None


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


def test_rows_in_a_file_are_those_in_memory(clicks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(TieredRows, "prefetch", lambda self, rows: asked.append(len(rows)))
    table, train = {"optimizer": "adam", "lr": 0.01}, {**CONSTANT, "micro_batch": 4}
    memory = run(clicks, ranking_job(ranking={"table": table}, output="memory", train=train))
    assert not asked
    without = run(clicks, ranking_job(ranking={"table": {**table, "memory_rows": 16}}, output="without", train=train))
    assert len(asked) == 5 and min(asked[1:]) > 10  # there are no rows in the first step, and none to come in the last
    monkeypatch.undo()
    monkeypatch.chdir(clicks)
    disk = run(clicks, ranking_job(ranking={"table": {**table, "memory_rows": 16}}, train=train))
    for other in (without, disk):
        assert other.losses == memory.losses
        assert_same_state(other.last_state(), memory.last_state())


def test_processes_bring_each_others_rows_from_their_files(clicks: Path, pool: Pool) -> None:
    table = {"memory_rows": 16, "eviction": {"max_rows": 20, "every": 2}}
    found = []
    for world in (1, 2):
        write_job(clicks, ranking_job(output=f"of {world}", ranking={"table": table}, train={**CONSTANT, "batch": 14}))
        found.append(pool.run(steps_in_layout, str(clicks), 6, (f"parallel.data={world}",), world=world)[0])
    assert found[1] == pytest.approx(found[0], rel=1e-12)


def test_rows_on_servers_are_those_of_the_trainer(clicks: Path) -> None:
    features = [{"name": "item_id", "width": 6}]
    here = run(clicks, ranking_job(output="here", ranking={"features": features}, train=CONSTANT))
    secret = clicks / "secret"
    secret.write_bytes(bytes(range(32, 96)))
    secret.chmod(0o600)
    server = RowServer(("127.0.0.1", 0), read_secret(secret), clicks / "rows", snapshot_every=3)
    threading.Thread(target=server.serve, daemon=True).start()
    try:
        address = "{}:{}".format(*server.address)
        block: dict[str, Any] = {"servers": {"addresses": [address], "secret": "secret", "patience": 20.0}}
        block |= {"table": {"memory_rows": 16}, "features": features}  # of the server
        run(clicks, ranking_job(ranking=block, steps=3, train=CONSTANT))
        served = run(clicks, ranking_job(ranking=block, train=CONSTANT))  # for the server another run
        assert served.loop.resumed_from == "disk"
    finally:
        server.close()
    assert served.losses == pytest.approx(here.losses, rel=1e-12)
    assert main(["eval", "run"]) == 0  # without the server
    wrong = ranking_job(ranking={"servers": {"addresses": ["a"], "secret": "s"}})
    with pytest.raises(UserError, match="this is no HOST:PORT"):
        prepare(load_job(write_job(clicks, wrong)), clicks)


@pytest.mark.slow  # three runs with a checkpoint in every step
def test_increments_from_servers_are_the_rows_to_the_bit(clicks: Path) -> None:
    """Also where a server is killed between a base and what adds to it, and the run goes on from an increment."""
    secret = clicks / "secret"
    secret.write_bytes(bytes(range(32, 96)))
    secret.chmod(0o600)
    table = {"admission": {"count": 2}, "eviction": {"age": 2, "every": 2}}
    common = {"train": CONSTANT, "steps": 8}

    def job(output: str, **changes: Any) -> dict[str, Any]:
        checkpoint = {"every": 1, "best": False, "memory": 0, "keep": 20, **changes.pop("checkpoint", {})}
        return ranking_job(output=output, checkpoint=checkpoint, **{**common, **changes})

    whole = run(clicks, job("whole", ranking={"table": table}))
    folders = [clicks / "rows-0", clicks / "rows-1"]
    servers = [RowServer(("127.0.0.1", 0), read_secret(secret), folder, snapshot_every=3) for folder in folders]
    for server in servers:
        threading.Thread(target=server.serve, daemon=True).start()

    def return_after(number: int) -> Callable[[], None]:
        def again() -> None:
            servers[number].close()
            address = servers[number].address
            servers[number] = RowServer(address, read_secret(secret), folders[number], snapshot_every=3)
            threading.Thread(target=servers[number].serve, daemon=True).start()

        return again

    block = {
        "table": table,
        "servers": {"addresses": ["{}:{}".format(*s.address) for s in servers], "secret": "secret"},
    }
    try:
        increments = {"ranking": block, "checkpoint": {"full_every": 4}}
        first = run(clicks, job("served", **increments), "steps=3", before=at_sample(24, return_after(0)))
        assert first.store.numbers(3).get("base") == 1  # the newest one is an increment
        served = run(clicks, job("served", **increments), before=at_sample(60, return_after(1)))
        assert served.loop.resumed_from == "disk"
    finally:
        for server in servers:
            server.close()
    assert {step: served.store.numbers(step).get("base") for step in served.store.steps()} == {
        1: None, 2: 1, 3: 1, 4: None, 5: 4, 6: 4, 7: 4, 8: None,
    }  # fmt: skip
    assert served.losses == whole.losses
    for step in range(1, 9):
        rows, others = (rows_by_id(ran.store.load(step).tensors) for ran in (whole, served))
        assert rows.keys() == others.keys() and all(torch.equal(rows[name], others[name]) for name in rows)


def test_rows_without_a_group_are_in_no_metric_of_groups(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    users = [None if n % 3 == 0 else n % 5 for n in range(60)]  # user 0 is a user like any other
    rows = [
        {"label": int(label), "user_id": user} for label, user in zip(random.integers(0, 2, 60), users, strict=True)
    ]
    rows += [{"label": n % 2, "user_id": None} for n in range(7)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    log = open_log([SourceBlock(path="log.jsonl")], LogSettings(), tmp_path, held_out=[], fraction=0.1)
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


@pytest.mark.slow  # a layout is run eight times
def test_verify_compares_layouts(clicks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_job(clicks, {**ranking_job(), "train": {"batch": 8}, "parallel": {"data": 2}})
    assert main(["verify", "job.yaml", "--steps", "3"]) == 0
    assert "1 of 1 layouts compute what one process computes" in capsys.readouterr().out


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
