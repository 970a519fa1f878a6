"""Exports of ranking models: a folder, LMDB and Redis give the scores of the run, and are refused where they do not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click_logs import ranking_job, write_clicks
from torch import Tensor, nn

from stoker.cli.main import main
from stoker.data.ranking.encode_rows import BadRowError, concatenate_batches, encode_rows
from stoker.data.ranking.features import Column, Features
from stoker.data.ranking.recorded_features import features_of_run
from stoker.errors import UserError
from stoker.hardware.process_device import choose_device
from stoker.job.load_job import load_job
from stoker.models.ranking.model_inputs import RankingInputs, RankingShape, side_by_side
from stoker.online_store.row_reader import RowReader
from stoker.online_store.store_writers import writer_of
from stoker.parallel.float64_mode import arithmetic_of
from stoker.runs.run_folder import RunFolder
from stoker.train.ranking import export_ranking, exported_tower
from stoker.train.ranking.open_run import TRUSTED, open_job, restored_task, rows_of
from stoker.train.ranking.ranking_scorer import RankingScorer, RowScores, StoredScorer
from stoker.train.single_process import SingleProcess

pytestmark = pytest.mark.usefixtures("in_process_replay")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a log and runs on it."""
    home = tmp_path_factory.mktemp("runs")
    write_clicks(home / "clicks.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        yield home


@pytest.fixture(autouse=True)
def no_onnx(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most tests do without, as torch takes two seconds for a graph."""
    monkeypatch.setattr(exported_tower, "ONNX_PACKAGES", ("onnx_of_nobody",))


def trained(home: Path, name: str, **ranking: Any) -> str:
    """A run of six steps, once."""
    precision = ranking.pop("precision", "fp64")
    if not (home / name).exists():
        changes = {"train": {"batch": 12, "lr": 1e-2, "precision": precision, "warmup": 0}}
        job = ranking_job(output=name, ranking=ranking, **changes)
        (home / f"{name}.yaml").write_text(json.dumps(job))
        assert main(["train", str(home / f"{name}.yaml")]) == 0
    return name


def offline(home: Path, run: str) -> np.ndarray:
    """The logits of the held-out rows by the run itself."""
    folder, loaded = open_job(run, (TRUSTED,), home)
    features = features_of_run(folder)
    rows = rows_of(loaded, features, None, "auto", home)
    device = choose_device(load_job(folder.job).job.train.precision)
    with arithmetic_of(device):
        task, _ = restored_task(folder, loaded, features, rows, device, "last", home)
        return task.score(rows, SingleProcess(task, device, ()))[1].logits


def held_out(home: Path) -> list[dict[str, Any]]:
    """The held-out rows as they are in the log, without what a service does not have."""
    rows = [json.loads(line) for line in (home / "clicks.jsonl").read_text().splitlines()][180:]
    return [{k: v for k, v in row.items() if k not in ("clicked", "bought", "timestamp")} for row in rows]


def online(place: str, home: Path, **options: Any) -> np.ndarray:
    return logits(StoredScorer(RowReader(place), **options), home)


def logits(scorer: StoredScorer, home: Path) -> np.ndarray:
    """Of the held-out rows, in two requests and a bad one."""
    rows = held_out(home)
    first, bad, rest = scorer.score([rows[:7], [{"price": "dear"}], rows[7:]])
    assert isinstance(first, RowScores) and isinstance(rest, RowScores) and isinstance(bad, BadRowError)
    assert first.outputs == ("clicked",) and not first.unknown and first.step == 6
    return np.concatenate([first.logits, rest.logits])


@pytest.mark.parametrize("model", ["deepfm", "din", "two-tower"])
@pytest.mark.often("two-tower", then="slow")
def test_online_scores_are_the_offline_ones(
    model: str, home: Path, redis_place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = ["device", "user_id" if model == "two-tower" else "item_id"]
    crosses = {"crosses": [pair]} if model != "din" else {}
    item = {"item": ["item_id"]} if model == "two-tower" else {}
    bounded = {"table": {"eviction": {"every": 2, "max_rows": 30, "default_row": "mean"}}} if model == "deepfm" else {}
    features = [{"name": "item_id", "width": 6}, {"name": "device", "width": 2}]
    run = trained(home, model, model=model, features=features, **crosses, **item, **bounded)
    expected = offline(home, model)
    places = [str(home / f"{model}-out"), f"lmdb://{home}/{model}.lmdb", f"{redis_place}?prefix={model}"]
    for place in places:
        assert main(["export", run, "--format", "ranking", "--to", place, "--json"]) == 0
        out, err = capsys.readouterr()
        stages = [f"opening {run}", "computing the run's own scores", f"writing ranking to {place}"]
        assert err.splitlines()[:3] == [f"{stage} ..." for stage in stages] and "comparing what a fresh process" in err
        said = json.loads(out.splitlines()[-1])
        assert said["step"] == 6 and "bitwise equal" in said["verified"]
        defaults = RowReader(place).rows({"user_id": np.array([10**9]), "item_id": np.array([10**9])})
        assert all(row.any() == (model == "deepfm") for row in defaults.values())
        assert np.abs(online(place, home) - expected).max() < 1e-12
        assert np.abs(online(place, home, trusted=True, graph=True) - expected).max() < 1e-12
    event = RunFolder(home / run).read_events()[-1]
    assert event["event"] == "exported" and event["version"] == 1 and event["to"] == places[-1]


@pytest.mark.slow
def test_rows_in_int8_and_half_and_the_average_of_weights(home: Path) -> None:
    for dtype in ("int8", "float16"):
        run = trained(home, dtype, precision="fp32", model="dcn", table={"dtype": dtype, "admission": {"count": 3}})
        assert main(["export", run, "--format", "ranking", "--to", f"{dtype}-out"]) == 0
        assert np.abs(online(f"{dtype}-out", home) - offline(home, run)).max() < 1e-5


@pytest.mark.slow
def test_versions_are_kept_listed_and_rolled_back(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = f"lmdb://{home}/versions"
    for run in ("deepfm", "dcn", "deepfm", "dcn"):
        trained(home, run, model=run)
        assert main(["export", run, "--format", "ranking", "--to", place, "--keep", "2"]) == 0
    capsys.readouterr()
    assert main(["export", "--versions", place, "--json"]) == 0
    listed = [(v["version"], v["run"], v["current"]) for v in json.loads(capsys.readouterr().out)]
    assert listed == [(3, "deepfm", False), (4, "dcn", True)]
    reader = RowReader(place)
    follower = StoredScorer(reader)
    assert np.abs(logits(follower, home) - offline(home, "dcn")).max() < 1e-12
    assert main(["export", "--rollback", place]) == 0
    assert capsys.readouterr().out == f"{place}: version 4 -> 3\n"
    assert np.abs(logits(follower, home) - offline(home, "deepfm")).max() < 1e-12
    assert main(["export", "--rollback", place]) == 2
    assert "no version before 3: there are 3, 4" in capsys.readouterr().err
    assert main(["export", "--rollback", place, "--version", "4"]) == 0
    assert main(["export", "--versions", place]) == 0
    assert "*      4" in capsys.readouterr().out


@pytest.mark.parametrize("what", ["tower", "rows"])
def test_what_scores_differently_is_refused(
    what: str, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(home, "deepfm", model="deepfm")
    if what == "tower":
        inner = export_ranking.weights_of

        def spoilt(tower: nn.Module) -> bytes:
            with torch.no_grad():
                next(iter(tower.parameters())).add_(0.01)
            return inner(tower)

        monkeypatch.setattr(export_ranking, "weights_of", spoilt)
        says = "scores differently"
    else:
        rows_of_state = export_ranking.stored_rows
        monkeypatch.setattr(export_ranking, "stored_rows", lambda s: (rows_of_state(s)[0], rows_of_state(s)[1][::-1]))
        says = "are others when they are read back"
    target, place = home / f"{what}-spoilt", f"lmdb://{home}/{what}.spoilt"
    assert main(["export", run, "--format", "ranking", "--to", str(target)]) == 1
    error = capsys.readouterr().err
    assert says in error and f"{what}-spoilt.differs" in error and not target.exists()
    assert main(["export", run, "--format", "ranking", "--to", place]) == 1
    assert says in capsys.readouterr().err
    assert writer_of(place).current() == 0 and not writer_of(place).versions()


class OwnTower(nn.Module):
    """A user's module, which torch.export follows."""

    def __init__(self, shape: RankingShape) -> None:
        super().__init__()
        self.shape, self.linear = shape, nn.Linear(shape.inputs, 1)

    def forward(self, inputs: RankingInputs) -> torch.Tensor:
        return self.linear(side_by_side(inputs, self.shape).tanh())


class BranchingTower(OwnTower):
    """One that it does not follow."""

    def forward(self, inputs: RankingInputs) -> torch.Tensor:
        return super().forward(inputs) * (2 if float(inputs.dense.sum()) > 0 else 1)


def test_a_module_of_ones_own_is_served_by_its_graph_where_that_is_trusted(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(home, "own", model="test_export_ranking:OwnTower")
    words = ["export", run, "--format", "ranking", "--to", "own-out"]
    assert main(words) == 2 and "--trust-remote-code" in capsys.readouterr().err
    assert main([*words, "--trust-remote-code"]) == 0
    with pytest.raises(UserError, match="--trust-remote-code"):
        online("own-out", home)
    assert np.abs(online("own-out", home, trusted=True) - offline(home, run)).max() < 1e-12
    run = trained(home, "branching", model="test_export_ranking:BranchingTower")
    capsys.readouterr()
    assert main(["export", run, "--format", "ranking", "--to", "no", "--trust-remote-code"]) == 2
    assert "torch.export cannot follow BranchingTower" in capsys.readouterr().err


@pytest.mark.slow  # torch takes two seconds for each graph of ONNX
@pytest.mark.parametrize("model", ["dlrm", "dcn", "deepfm", "wide-deep", "din", "mmoe", "ple", "esmm", "two-tower"])
@pytest.mark.often("dlrm", "din")
def test_every_model_is_onnx_too(model: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exported_tower, "ONNX_PACKAGES", ("onnx",))
    further: dict[str, Any] = {"item": ["item_id"]} if model == "two-tower" else {}
    if model in ("ple", "esmm"):
        further = {"label": ["clicked", "bought"], "ignore": []}
    run = trained(home, f"onnx-{model}", model=model, precision="fp32", **further)
    assert main(["export", run, "--format", "ranking", "--to", f"{run}-out"]) == 0
    assert "tower.onnx" in RunFolder(home / run).read_events()[-1]["verified"]


def test_without_the_extra_there_is_no_onnx_and_a_warning(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(home, "deepfm", model="deepfm")
    assert main(["export", run, "--format", "ranking", "--to", "plain"]) == 0
    assert "pip install 'stoker[onnx]'" in capsys.readouterr().err
    names = ["manifest.json", "tables", "tower.pt2", "tower.safetensors"]
    assert sorted(path.name for path in (home / "plain").iterdir()) == names


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["deepfm", "--format", "merged", "--to", "x"], "export RUN --format ranking --to DIR`"),
        (["deepfm", "--format", "merged", "--to", "x", "--keep", "2"], "give it with --format ranking"),
        (["deepfm", "--format", "ranking", "--to", "mysql://x"], "no store of kind mysql"),
        (["deepfm", "--format", "ranking", "--to", "clicks.jsonl"], "exists already"),
        (["deepfm", "--format", "ranking", "--to", "x", "--dtype", "fp16"], "keeps the precision"),
        (["deepfm", "--format", "ranking", "--to", "x", "--keep", "0"], "--keep must be at least 1"),
        (["deepfm", "--format", "ranking", "--to", "x", "--keep", "5"], "x is a folder, which has one version"),
        (["deepfm", "--rollback", "lmdb://x"], "RUN has no effect with --rollback: remove it"),
        (["--to", "x", "--versions", "lmdb://x"], "--to has no effect with --versions"),
        (["--versions", "lmdb://x", "--version", "3"], "--version has no effect with --versions"),
        (["--versions", "lmdb://x", "--rollback", "lmdb://x"], "--versions has no effect with --rollback"),
        (["--rollback", "lmdb://x", "--at", "best"], "--at has no effect with --rollback"),
        (["deepfm", "--format", "ranking", "--to", "x", "--version", "1"], "needs --rollback"),
        (["deepfm", "--format", "ranking"], "--to is missing"),
        (["--format", "ranking", "--to", "x"], "RUN is missing"),
        (["--rollback", "folder"], "is a folder, which has one version"),
        (["--versions", "lmdb://absent"], "there is no store"),
    ],
)
def test_mistakes_are_named(words: list[str], says: str, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(home, "deepfm", model="deepfm")
    capsys.readouterr()
    assert main(["export", *words]) == 2
    assert says in capsys.readouterr().err and not (home / "x").exists()


def test_a_row_whose_score_is_not_finite_is_named_with_its_furthest_number() -> None:
    columns = (Column("age", "dense", mean=40.0), Column("price", "dense", mean=2.0, scale=0.3))

    def tower(inputs: RankingInputs) -> Tensor:
        return inputs.dense.sum(1, keepdim=True) * (1e38 if inputs.dense.abs().max() > 1e5 else 1.0)

    scorer = RankingScorer(
        tower,
        lambda _: {},  # type: ignore[arg-type]
        RankingShape((), numbers=2),
        Features(("clicked",), columns),
        first_order=False,
        dtype=torch.float32,
        step=1,
    )
    [answer] = scorer.score([[{"age": 41, "price": 2}, {"age": 41, "price": 3e38}]])
    assert isinstance(answer, BadRowError) and answer.row == 1
    assert answer.reason == "its score is not finite; price is furthest from its mean, 2"
    assert scorer.encode([{"price": 3e38}, {"price": -3e38}])[0].dense[:, 1].tolist() == [1e6, -1e6]


def test_single_rows_are_encoded_as_those_of_a_log(home: Path) -> None:
    folder, loaded = open_job(trained(home, "deepfm", model="deepfm"), (), home)
    features = features_of_run(folder)
    log = rows_of(loaded, features, None, "auto", home)
    expected, rows = log.batch(np.arange(len(log))), held_out(home)
    parts = [encode_rows(rows[s], features)[0] for s in (slice(0, 1), slice(1, 40), slice(40, None))]
    found = concatenate_batches(parts)
    assert np.array_equal(found.dense, expected.dense)
    for name, ids in expected.ids.items():
        assert np.array_equal(found.ids[name].ids, ids.ids) and np.array_equal(found.ids[name].lengths, ids.lengths)
        assert (ids.weights is None) == (found.ids[name].weights is None)
        assert ids.weights is None or np.array_equal(found.ids[name].weights, ids.weights)
    batch, unknown = encode_rows([{"user_id": 1, "clicked": "perhaps", "pric": 3}, {}], features)
    assert unknown == {"pric": 1} and batch.ids["user_id"].lengths.tolist() == [1, 0]
    with pytest.raises(BadRowError, match="row 1: not a number: price is 'dear'"):
        encode_rows([{}, {"price": "dear"}, {"price": "x"}], features)
