"""``engine: torchrec``: the same job on TorchRec's tables, and what they cannot do."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click_logs import ranking_job
from running import assert_same_state, run, stop_at, write_job

from stoker.cli.main import main
from stoker.errors import CannotRun, UserError
from stoker.job.layout import layout_of
from stoker.job.load_job import load_job
from stoker.launch.process_pool import Pool
from stoker.parallel.mesh import Mesh
from stoker.runs.run_folder import RunFolder
from stoker.train.prepare import prepare
from stoker.train.run import train_run

COUNTS = ("table_rows", "ids_admitted", "ids_evicted")  # of tables that grow
TRAIN = {"batch": 12, "lr": 1e-2, "precision": "fp32", "warmup": 0, "schedule": "linear"}


def job_of(engine: str, **changes: Any) -> dict[str, Any]:
    """A job in single precision whose rows begin at 0, wherever they are."""
    block = {**changes.pop("ranking", {})}
    table = {"init_scale": 0.0, **block.pop("table", {})}
    if engine == "torchrec":
        block, table = {"engine": engine, **block}, {"rows": 5000, **table}
    return ranking_job(ranking={**block, "table": table}, train=TRAIN, output=engine, **changes)


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [("deepfm", "rowwise-adagrad"), ("dcn", "adagrad"), ("mmoe", "sgd"), ("ple", "sgd"), ("esmm", "sgd")],
    ids=str,
)
@pytest.mark.slow
def test_losses_and_metrics_are_those_of_the_own_engine(model: str, optimizer: str, clicks: Path) -> None:
    block: dict[str, Any] = {"model": model, "table": {"optimizer": optimizer, "lr": 0.1}}
    if model in ("mmoe", "ple", "esmm"):
        block |= {"label": ["clicked", "bought"], "ignore": []}
    own = run(clicks, job_of("stoker", ranking=block, steps=15))
    other = run(clicks, job_of("torchrec", ranking=block, steps=15))
    assert other.losses == pytest.approx(own.losses, rel=2e-5)
    assert own.loop.evaluation is not None and other.loop.evaluation is not None
    # Ids that were never trained on: zeros for the own engine; here rows of 0, unless another id has trained them.
    measures = [
        {name: value for name, value in ran.loop.evaluation.measures.items() if name not in COUNTS}
        for ran in (other, own)
        if ran.loop.evaluation is not None
    ]
    assert "auc" in measures[0] and measures[0] == pytest.approx(measures[1], rel=1e-3)
    assert other.loop.evaluation.measures["table_rows"] == sum(other.prepared.task.tables.rows.values())


def test_samples_of_several_passes_make_one_step(clicks: Path) -> None:
    own = run(clicks, job_of("stoker"), "train.micro_batch=4")
    other = run(clicks, job_of("torchrec"), "train.micro_batch=4")
    assert other.losses == pytest.approx(own.losses, rel=2e-5)


def losses_of_layout(path: str, overrides: tuple[str, ...]) -> list[float]:
    base = Path(path)
    loaded = load_job(base / "job.yaml", overrides)
    layout = layout_of(loaded.job)
    mesh = Mesh(layout, torch.device("cpu")) if layout.world > 1 else None
    prepared, folder = prepare(loaded, base, mesh=mesh), RunFolder(base / loaded.job.output)
    folder.path.mkdir(exist_ok=True)
    train_run(prepared, folder, base, quiet=True)
    events = [event["loss"] for event in folder.read_events() if event["event"] == "evaluated"]
    return [line["loss"] for line in folder.read_metrics()] + events


@pytest.mark.slow  # every process of the pool imports TorchRec
@pytest.mark.parametrize(
    ("world", "overrides"),
    [(2, ()), (3, ()), (2, ("parallel.shard=zero2", "train.micro_batch=2"))],
    ids=["2", "3", "zero2"],
)
def test_processes_compute_what_one_does(world: int, overrides: tuple[str, ...], clicks: Path, pool: Pool) -> None:
    write_job(clicks, job_of("torchrec"))
    alone = losses_of_layout(str(clicks), ("output=alone",))
    many = pool.run(losses_of_layout, str(clicks), (f"parallel.data={world}", *overrides), world=world)
    assert many[0] == pytest.approx(alone, rel=2e-5) and len(alone) == 6 + 3


def test_a_stopped_run_goes_on(clicks: Path) -> None:
    whole = run(clicks, {**job_of("torchrec"), "output": "whole"})
    stopped = run(clicks, job_of("torchrec"), before=stop_at(30))
    assert stopped.outcome.step < 6
    resumed = run(clicks, job_of("torchrec"))
    assert resumed.loop.resumed_from == "disk" and resumed.losses == whole.losses
    assert_same_state(resumed.last_state(), whole.last_state())
    with pytest.raises(UserError, match=r"ranking\.engine was 'torchrec' and is 'stoker'"):
        run(clicks, {**job_of("stoker"), "output": "torchrec"})


@pytest.mark.slow  # every process of the pool imports TorchRec
def test_a_checkpoint_of_any_processes_is_restored_by_any_other(clicks: Path, pool: Pool) -> None:
    job = {**job_of("torchrec"), "train": {**TRAIN, "schedule": "constant"}}
    whole = run(clicks, job)
    for steps, world in ((2, 2), (4, 1), (6, 3)):
        overrides = (f"steps={steps}", f"parallel.data={world}", "output=changing")
        found = pool.run(losses_of_layout, str(clicks), overrides, world=world)[0]
    assert found[:6] == pytest.approx(whole.losses, rel=2e-5)


def test_a_step_that_is_not_finite_leaves_the_rows_alone(clicks: Path) -> None:
    job = {**job_of("torchrec"), "faults": {"restarts": 0, "check": False, "not_finite": "skip"}}
    prepared = prepare(load_job(write_job(clicks, job)), clicks)
    task = prepared.task
    before = task.tables.state().tables
    part = task.parts(0, 12)[0]
    (task.loss(part).total * torch.nan).backward()
    assert not task.tables.gradients_are_finite()
    task.tables.discard()
    after = task.tables.state().tables
    assert all(torch.equal(after[name].values, table.values) for name, table in before.items())


def test_the_verbs_of_a_run(clicks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_job(clicks, job_of("torchrec", steps=20))
    assert main(["train", "job.yaml"]) == 0
    assert "5,000 rows each by TorchRec, to which ids are hashed" in (said := capsys.readouterr().out)
    assert "eval torchrec" in said and "export torchrec" not in said
    assert main(["eval", "torchrec", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    events = [event for event in RunFolder(clicks / "torchrec").read_events() if event["event"] == "evaluated"]
    assert found["log_loss"] == pytest.approx(events[-1]["log_loss"], rel=1e-6) and found["step"] == 20
    assert found["auc"] is not None and found["calibration"] is not None
    for words, said in (
        (["export", "torchrec", "--format", "ranking", "--to", "exported"], "an export has rows by their ids"),
        (["verify", "job.yaml"], "`stoker verify` compares in float64"),
        (["plan", "job.yaml"], "`stoker plan` counts ids"),
    ):
        assert main(words) == 2
        error = capsys.readouterr().err
        assert said in error and "job.yaml:" in error and "`engine: stoker`" in error


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"ranking": {"table": {"eviction": {"age": 5}}}}, "never deletes a row"),
        ({"ranking": {"table": {"admission": {"count": 2}}}}, "gives every id a row at once"),
        ({"ranking": {"table": {"memory_rows": 5}}}, "keeps all rows in the device's memory"),
        ({"ranking": {"table": {"optimizer": "adam"}}}, "write rowwise-adagrad, adagrad or sgd"),
        ({"ranking": {"table": {"optimizer": "ftrl"}}}, "has no ftrl"),
        ({"ranking": {"table": {"initial": 0.1}}}, "starts its sums of squares at 0"),
        ({"ranking": {"table": {"dtype": "int8"}}}, "has rows of float32, and `dtype` is int8"),
        ({"ranking": {"servers": {"addresses": ["h:1"], "secret": "s"}}}, "remove `servers`"),
        ({"ranking": {"model": "din"}}, "write `model: dcn`"),
        ({"checkpoint": {"full_every": 3}}, "write `full_every: 1`"),
        ({"export": {"sync": {"to": "lmdb://tables"}}}, "remove `sync`"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_it_cannot_do_is_said_with_its_place(changes: dict[str, Any], says: str, clicks: Path) -> None:
    with pytest.raises(UserError) as error:
        load_job(write_job(clicks, job_of("torchrec", **changes)))
    assert says in str(error.value) and "`engine: stoker`" in str(error.value)
    assert "job.yaml:" in str(error.value)


def test_rows_and_precision_are_of_one_engine(clicks: Path) -> None:
    with pytest.raises(UserError, match="those of `engine: stoker` grow"):
        load_job(write_job(clicks, job_of("stoker", ranking={"table": {"rows": 5}})))
    with pytest.raises(UserError, match="`precision` is fp64"):
        load_job(write_job(clicks, {**job_of("torchrec"), "train": {**TRAIN, "precision": "fp64"}}))


def test_without_the_package_it_is_said_what_to_install(
    clicks: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_job(clicks, job_of("torchrec"))
    monkeypatch.setitem(sys.modules, "torchrec", None)
    monkeypatch.delitem(sys.modules, "stoker.sparse.torchrec_tables", raising=False)
    assert main(["train", "job.yaml"]) == CannotRun.exit_code
    error = capsys.readouterr().err
    wheel = "fbgemm-gpu" if torch.version.cuda else "fbgemm-gpu-cpu"
    assert f"{wheel}==1.8.0" in error and "torchrec==1.8.0" in error and "Traceback" not in error
