"""Ranking models behind the server: online scores are the offline ones, of runs, folders and stores that change."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import InProcess, started

from replay_in_process import replay_in_process
from stoker.cli.main import main
from stoker.data.ranking.features import Features
from stoker.data.ranking.recorded_features import features_of_run
from stoker.errors import UserError
from stoker.models.tuning.quantise import device_for
from stoker.online_store.row_backends import StoreError
from stoker.parallel.float64_mode import arithmetic_of
from stoker.serve.ranking_app import RankingService, ranking_app
from stoker.serve.ranking_server import open_scorers, ranking_service, ranks
from stoker.serve.score_batcher import ScoreBatcher
from stoker.serve.server_options import ServerOptions
from stoker.train.ranking import exported_tower
from stoker.train.ranking.open_run import open_job, restored_task, rows_of
from stoker.train.ranking.ranking_scorer import Answer, RowScores
from stoker.train.single_process import SingleProcess

JOB = """task: ranking
data: clicks.jsonl
ranking: {label: [clicked, bought], model: %s, width: 4, hidden: [8, 6]}
steps: 6
train: {batch: 12, lr: 1e-2, precision: fp32}
evaluate: {fraction: 0.25}
"""


@pytest.fixture(scope="module")
def clicks_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two runs on a log, and the first one as a folder and in LMDB."""
    home, random = tmp_path_factory.mktemp("ranking"), np.random.default_rng(0)
    rows = [
        {
            "clicked": int(c),
            "bought": int(c and n % 2),
            "user_id": int(u),
            "item_id": f"i{i}",
            "price": float(p),
        }
        for n, (c, u, i, p) in enumerate(
            zip(random.random(200) < 0.4, *random.integers(0, 9, (2, 200)), random.random(200), strict=True)
        )
    ]
    (home / "clicks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.MonkeyPatch.context() as patch, replay_in_process():
        patch.chdir(home)
        patch.setattr(exported_tower, "ONNX_PACKAGES", ("onnx_of_nobody",))
        for name, model in (("shop", "mmoe"), ("other", "dcn")):
            (home / f"{name}.yaml").write_text(JOB % model)
            assert main(["train", f"{name}.yaml"]) == 0
        for place in ("folder", "lmdb://store"):
            assert main(["export", "shop", "--format", "ranking", "--to", place]) == 0
        yield home


@dataclass
class Asked(InProcess):
    """The application of ranking models without a socket."""

    service: RankingService  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self.app = ranking_app(self.service)


@pytest.fixture(scope="module")
def asked(clicks_home: Path) -> Iterator[Asked]:
    names = ["shop", "copy=folder", "live=lmdb://store"]
    scorers = open_scorers(names, clicks_home, at="last", trusted=(), cache_rows=100, cache_seconds=1.0)
    service = ranking_service(scorers, ServerOptions(body=1 << 20, queue=4))
    yield Asked(service)
    for batcher in service.models.values():
        batcher.close()


def rows_in(home: Path) -> list[dict[str, Any]]:
    """The held-out rows, without labels."""
    lines = [json.loads(line) for line in (home / "clicks.jsonl").read_text().splitlines()][150:]
    return [{name: row[name] for name in ("user_id", "item_id", "price")} for row in lines]


def offline(home: Path, run: str) -> np.ndarray:
    """Their probabilities by the run."""
    folder, loaded = open_job(run, (), home)
    features, device = features_of_run(folder), device_for(loaded.job)
    rows = rows_of(loaded, features, None, "auto", home)
    with arithmetic_of(device):
        task, _ = restored_task(folder, loaded, features, rows, device, "last", home)
        return 1 / (1 + np.exp(-task.score(rows, SingleProcess(task, device, ()))[1].logits))


def test_online_scores_are_the_offline_ones(asked: Asked, clicks_home: Path) -> None:
    expected, rows = offline(clicks_home, "shop"), rows_in(clicks_home)
    for model in ("shop", "copy", "live"):
        found = asked.post("/v1/score", {"model": model, "rows": rows}).json
        scores = [[entry["scores"]["clicked"], entry["scores"]["bought"]] for entry in found["data"]]
        assert np.abs(np.array(scores) - expected).max() < 1e-6 and found["step"] == 6 and found["model"] == model
        assert [entry["score"] for entry in found["data"]] == [first for first, _ in scores]
    assert (
        "x-stoker-ignored"
        not in asked.post("/v1/score", {"model": "shop", "rows": [{"price": 1, "clicked": 1}]}).headers
    )
    columns = asked.get("/v1/models/copy").json["columns"]  # a first question is a row of missing values
    assert asked.post("/v1/score", {"model": "copy", "rows": [dict.fromkeys(columns)]}).status == 200
    assert b'stoker_rows_scored_total{key="",model="shop"} 51.0' in asked.get("/metrics").body


@pytest.mark.slow
def test_a_run_on_torchrec_s_tables_is_served(clicks_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(clicks_home)
    (clicks_home / "fixed.yaml").write_text(JOB % "dcn, engine: torchrec, table: {rows: 500}")
    assert main(["train", "fixed.yaml"]) == 0
    scorers = open_scorers(["fixed"], clicks_home, at="last", trusted=(), cache_rows=100, cache_seconds=1.0)
    service = ranking_service(scorers, ServerOptions())
    try:
        reply = Asked(service).post("/v1/score", {"model": "fixed", "rows": rows_in(clicks_home)})
    finally:
        for batcher in service.models.values():
            batcher.close()
    assert reply.status == 200, reply.body
    scores = [[entry["scores"]["clicked"], entry["scores"]["bought"]] for entry in reply.json["data"]]
    assert np.abs(np.array(scores) - offline(clicks_home, "fixed")).max() < 1e-6


def test_ids_without_a_row_are_told(asked: Asked, clicks_home: Path) -> None:
    known = {line["item_id"] for line in map(json.loads, (clicks_home / "clicks.jsonl").read_text().splitlines())}
    assert "i3" in known and "new" not in known
    rows = [
        {"user_id": 3, "item_id": "i3", "price": 0.5},
        {"user_id": 4711, "item_id": "i3"},
        {"item_id": "new"},
    ]
    for model in ("shop", "copy", "live"):
        found = asked.post("/v1/score", {"model": model, "rows": rows, "lookups": True}).json["data"]
        assert [entry["lookups"] for entry in found] == [
            {"user_id": {"found": 1, "missing": 0}, "item_id": {"found": 1, "missing": 0}},
            {"user_id": {"found": 0, "missing": 1}, "item_id": {"found": 1, "missing": 0}},
            {"user_id": {"found": 0, "missing": 0}, "item_id": {"found": 0, "missing": 1}},
        ]
        assert "lookups" not in asked.post("/v1/score", {"model": model, "rows": rows}).json["data"][0]


def test_a_store_that_changes_changes_the_scores(asked: Asked, clicks_home: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(exported_tower, "ONNX_PACKAGES", ("onnx_of_nobody",))
    rows = rows_in(clicks_home)

    def live() -> np.ndarray:
        found = asked.post("/v1/score", {"model": "live", "rows": rows}).json
        return np.array([list(entry["scores"].values()) for entry in found["data"]])

    with replay_in_process():
        assert main(["export", "other", "--format", "ranking", "--to", "lmdb://store"]) == 0
    assert np.abs(live() - offline(clicks_home, "other")).max() < 1e-6
    assert main(["export", "--rollback", "lmdb://store"]) == 0
    assert np.abs(live() - offline(clicks_home, "shop")).max() < 1e-6


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"model": "shop", "rows": []}, 400, "`rows` must not be empty"),
        ({"model": "shop"}, 400, "`rows` is missing"),
        ({"model": "shop", "rows": [1]}, 400, "`rows[0]` must be an object"),
        ({"model": "shop", "rows": [{"price": 1}, {"prise": 1}]}, 400, "`rows[1]`: no column of the model"),
        ({"model": "shop", "rows": [{}]}, 400, "`rows[0]`: no column of the model"),
        ({"model": "shop", "rows": [{"price": "\ud800"}]}, 400, "a text in the body has half a surrogate pair"),
        ({"model": "shop", "rows": [{}], "bogus": 1}, 400, "unknown field `bogus`; known are model, rows, lookups"),
        ({"model": "shop", "rows": [{"price": 1}, {"price": "dear"}]}, 400, "`rows[1]`: not a number: price is 'dear'"),
        ({"model": "shop", "rows": [{"user_id": 2**70}]}, 400, "`rows[0]`: id out of range"),
        ({"model": "shop", "rows": [{"item_id": [1]}]}, 400, "`rows[0]`: not an id"),
        ({"model": "shop", "rows": [{}] * 10_001}, 400, "10000"),
        ({"model": "show", "rows": [{}]}, 404, "did you mean shop?"),
        ({"model": "shop", "rows": [{}], "temperature": 1}, 400, "unknown field `temperature`"),
    ],
)
def test_what_cannot_be_asked_is_said(body: dict[str, Any], status: int, says: str, asked: Asked) -> None:
    reply = asked.post("/v1/score", body)
    assert reply.status == status and says in reply.error["message"]


def test_fields_that_are_no_column_are_named(asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        reply = asked.post(
            "/v1/score", {"model": "shop", "rows": [{"user_id": 1, "prise": 3}, {"price": 1, "prise": 1, "\n": 1}]}
        )
        assert reply.status == 200 and reply.headers["x-stoker-ignored"] == "prise"
    assert capsys.readouterr().err.count("prise") == 1
    row = {"price": 1} | {f"{n:02d}价": 1 for n in range(30)}
    reply = asked.post("/v1/score", {"model": "shop", "rows": [row]})
    assert reply.status == 200
    assert reply.headers["x-stoker-ignored"] == ", ".join(f"{n:02d}\\u4ef7" for n in range(20))


def test_models_are_listed_and_others_paths_are_not_there(asked: Asked) -> None:
    listed = asked.get("/v1/models").json["data"]
    assert [entry["id"] for entry in listed] == ["shop", "copy", "live"]
    assert asked.get("/v1/models/shop").json["columns"] == ["user_id", "item_id", "price"]
    assert asked.get("/v1/models/shop").json["labels"] == ["clicked", "bought"]
    assert asked.get("/health").json == {"status": "ok"}
    assert asked.post("/v1/chat/completions", {}).status == 404
    assert asked.post("/v1/score", {}, headers={"host": "example.com"}).status == 403
    assert asked.post("/v1/score", b"{" + b" " * (1 << 20)).status == 413


class Slow:
    """Counts what it is asked at once, and can fail."""

    features, step = Features(("y",), ()), 3

    def __init__(self) -> None:
        self.passes: list[list[int]] = []
        self.go, self.error = threading.Event(), None

    def score(self, requests: Sequence[Any]) -> list[Answer]:
        self.go.wait(10)
        self.passes.append([len(rows) for rows in requests])
        if self.error is not None:
            raise self.error
        return [RowScores(np.full((len(rows), 1), float(len(rows))), ("y",), {}, 3) for rows in requests]


def test_requests_that_wait_are_scored_together() -> None:
    slow = Slow()
    batcher = ScoreBatcher(slow, most=6)
    futures = [batcher.score([{}] * n) for n in (4, 1, 3, 9, 2, 2, 2)]
    futures[4].cancel()
    batcher.start()
    slow.go.set()
    found = [future.result(10) for n, future in enumerate(futures) if n != 4]
    assert [float(one.logits[0, 0]) for one in found if isinstance(one, RowScores)] == [4, 1, 3, 9, 2, 2]
    assert slow.passes == [[4, 1], [3], [9], [2, 2]]
    batcher.close()
    assert not batcher.alive


def test_the_queue_the_time_and_a_store_that_is_lost() -> None:
    slow = Slow()
    asked = Asked(ranking_service({"m": slow}, ServerOptions(queue=2, seconds=0.3)))
    body = {"model": "m", "rows": [{}]}

    async def three() -> list[int]:
        return [
            reply.status for reply in await asyncio.gather(*(asked.ask("POST", "/v1/score", body) for _ in range(3)))
        ]

    assert sorted(asyncio.run(three())) == [429, 504, 504]
    slow.go.set()
    assert asked.post("/v1/score", body).status == 200
    slow.error = StoreError("gone")
    reply = asked.post("/v1/score", body)
    assert reply.status == 503 and reply.headers["retry-after"] == "1" and reply.error["code"] == "store_failed"
    slow.error = RuntimeError("a bug")
    assert asked.post("/v1/score", body).status == 500
    asked.service.draining = True
    assert asked.post("/v1/score", body).status == 503 and asked.get("/health").status == 503


def test_what_ranks_is_known_and_what_does_not_is_refused(clicks_home: Path) -> None:
    for one in ("shop", "a=runs/shop", "folder", "redis://h/0?prefix=a"):
        assert ranks(one, clicks_home)
    assert not ranks("clicks.jsonl", clicks_home)
    options: dict[str, Any] = {"at": "last", "trusted": (), "cache_rows": 0, "cache_seconds": 0.0}
    with pytest.raises(UserError, match="is not a ranking model"):
        open_scorers(["shop", "smollm2-135m"], clicks_home, **options)
    with pytest.raises(UserError, match="two models have the name shop"):
        open_scorers(["shop", "shop=folder"], clicks_home, **options)
    shutil.copytree(clicks_home / "folder", clicks_home / "spoilt")
    manifest = json.loads((clicks_home / "spoilt" / "manifest.json").read_text())
    without = json.dumps({key: value for key, value in manifest.items() if key != "sha256"}).encode()  # as older ones
    for name, content in (("tower.safetensors", b"x" * 30), ("manifest.json", b'{"format": 1, "tables": []}')):
        (clicks_home / "spoilt" / "manifest.json").write_bytes(without)
        (clicks_home / "spoilt" / name).write_bytes(content)
        with pytest.raises(UserError, match="spoilt cannot be used"):
            open_scorers(["spoilt"], clicks_home, **options)
    with pytest.raises(UserError, match=r"there is no store at"):
        open_scorers(["lmdb://absent"], clicks_home, **options)


@pytest.mark.slow  # a process of its own that imports torch
def test_the_verb_serves_over_http(clicks_home: Path) -> None:
    with started(clicks_home, "shop", "live=lmdb://store") as server:
        body = json.dumps({"model": "shop", "rows": rows_in(clicks_home)}).encode()
        request = urllib.request.Request(f"{server.url}/v1/score", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as reply:
            found = json.loads(reply.read())
        scores = np.array([list(entry["scores"].values()) for entry in found["data"]])
        assert np.abs(scores - offline(clicks_home, "shop")).max() < 1e-6


def test_a_folder_with_a_damaged_file_is_not_served(
    clicks_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(clicks_home / "folder", folder)
    shard = next(folder.glob("tables/*/*.safetensors"))
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    assert main(["serve", str(folder), "--port", "0"]) == 2
    assert f"{shard} has other contents than were exported" in capsys.readouterr().err
    shard.unlink()
    assert main(["serve", str(folder), "--port", "0"]) == 2
    assert f"{shard} cannot be read: No such file or directory" in capsys.readouterr().err
