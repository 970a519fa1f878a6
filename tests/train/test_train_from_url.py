"""Training on a model and data at URLs is training on the same files here, to the bit."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from counting_origin import CountingOrigin
from running import Ran, run, write_rows

from stoker.cli.main import main
from stoker.data import build_cache
from stoker.errors import RunFailed, UserError
from stoker.node_cache import remote_folder
from stoker.node_cache.cache_stats import StatsCounter

pytestmark = pytest.mark.usefixtures("warm_processes")

FIELDS = ("hits", "misses", "origin_bytes", "peer_bytes", "wait_seconds")


@pytest.fixture
def origin(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CountingOrigin]:
    """The rows and the model, at a web address; nothing of them is in the cache."""
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "cache"))
    fresh = StatsCounter()
    for module in ("object_cache", "download", "object_reader", "cache_stats"):
        monkeypatch.setattr(f"stoker.node_cache.{module}.HERE", fresh)
    monkeypatch.setattr("stoker.train.records.run_cache_stats.HERE", fresh)
    remote_folder._local_path.cache_clear()
    with CountingOrigin() as served:
        served.objects = {f"m/{file.name}": file.read_bytes() for file in tiny_model.iterdir()}
        served.objects["rows.jsonl"] = write_rows(tmp_path / "rows.jsonl", 40).read_bytes()
        yield served
    remote_folder._local_path.cache_clear()


def same(one: Ran, other: Ran) -> bool:
    a, b = (ran.prepared.task.model.state_dict() for ran in (one, other))
    return one.losses == other.losses and all(torch.equal(a[name], b[name]) for name in a)


def test_a_run_from_urls_is_the_run_from_the_files(base: Path, sft: dict[str, Any], origin: CountingOrigin) -> None:
    here = run(base, sft)
    there = run(base, sft, f"data={origin.url}/rows.jsonl", f"model={origin.url}/m", "output=there")
    assert same(here, there)
    lines = there.folder.read_metrics()
    moved = origin.sent["rows.jsonl"] + sum(size for name, size in origin.sent.items() if name.startswith("m/"))
    assert {line["cache_origin_bytes"] for line in lines} == {moved}
    assert all(f"cache_{name}" in lines[-1] for name in FIELDS)
    done = there.folder.read_events()[-1]
    assert done["event"] == "done" and done["cache_origin_bytes"] == moved and done["cache_peer_bytes"] == 0
    assert not any(name.startswith("cache_") for name in here.folder.read_metrics()[0])


def test_a_run_goes_on_from_the_same_content_only(
    base: Path, sft: dict[str, Any], origin: CountingOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.node_cache.object_cache.FRESH", -1.0)
    url = f"data={origin.url}/rows.jsonl"
    run(base, sft, url, "steps=5", "output=parts", "train.schedule=constant")
    moved = origin.total
    again = run(base, sft, url, "steps=8", "output=parts", "train.schedule=constant")
    assert origin.total == moved and [line["step"] for line in again.folder.read_metrics()] == list(range(1, 9))
    origin.objects["rows.jsonl"] = write_rows(base / "other.jsonl", 40, salt=1).read_bytes()
    with pytest.raises(UserError, match="has changed since the run"):
        run(base, sft, url, "steps=10", "output=parts", "train.schedule=constant")


@pytest.mark.slow
def test_a_stream_from_a_url_is_the_stream_from_the_file(
    base: Path, sft: dict[str, Any], origin: CountingOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins before all of the data is here."""
    monkeypatch.setattr("stoker.data.token_shards.SHARD_ROWS", 256)
    monkeypatch.setattr(build_cache, "CHUNK_ROWS", 16)
    origin.objects["long.jsonl"] = write_rows(base / "long.jsonl", 4000).read_bytes()
    origin.rate = len(origin.objects["long.jsonl"]) / 3
    words = ("data[0].stream=true", "steps=6")
    here = run(base, sft, "data=long.jsonl", *words)
    there = run(base, sft, f"data={origin.url}/long.jsonl", *words, "output=there")
    assert same(here, there)
    first = next(event for event in there.folder.read_events() if event["event"] == "started")
    assert there.folder.read_metrics()[0]["cache_origin_bytes"] < len(origin.objects["long.jsonl"])
    assert first["sources"][0]["name"] == f"{origin.url}/long.jsonl"


def test_data_that_changes_while_it_is_tokenised_leaves_no_tokens(
    base: Path, sft: dict[str, Any], origin: CountingOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.data.token_shards.SHARD_ROWS", 512)
    monkeypatch.setattr(build_cache, "CHUNK_ROWS", 64)
    monkeypatch.setattr("stoker.node_cache.download.WAIT", 0.0)
    data = write_rows(base / "long.jsonl", 4000).read_bytes()
    origin.objects["long.jsonl"] = data
    origin.cut["long.jsonl"] = len(data) // 2

    class Changing(dict[str, str]):
        def get(self, name: str, default: Any = None) -> Any:
            return '"new"' if name == "long.jsonl" and origin.asked("GET", name) else default

    origin.tags = Changing()
    with pytest.raises(RunFailed, match="has changed while it was read"):
        run(base, sft, f"data={origin.url}/long.jsonl")
    tokens = base / "cache" / "tokens"
    assert not list(tokens.glob("*/shard-*")) and not list(tokens.glob("*/complete.json"))


def test_wrong_urls_are_one_error_each_at_their_key(
    base: Path, origin: CountingOrigin, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(base)
    job = f"task: sft\nmodel: llama-3m\ndata:\n- rows.jsonl\n- {origin.url}/gone.jsonl\n- s4://b/x.jsonl\nsteps: 2\n"
    (base / "job.yaml").write_text(job)
    assert main(["train", "job.yaml"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert errors == [
        f"error: job.yaml:5:3: there is no object {origin.url}/gone.jsonl; look at its spelling",
        "error: job.yaml:6:3: there is no kind of store s4:// (s4://b/x.jsonl); did you mean s3://?",
    ]
    assert not (base / "runs").exists()
    assert main(["check", "job.yaml", f"data={origin.url}/gone.jsonl"]) == 2
    capsys.readouterr()
    assert main(["train", "job.yaml", "data=rows.jsonl", f"model={origin.url}/nothing"]) == 2
    assert f"there is no model in {origin.url}/nothing" in capsys.readouterr().err
    assert main(["data", "job.yaml", f"data={origin.url}/gone.jsonl"]) == 2
    assert f"there is no object {origin.url}/gone.jsonl" in capsys.readouterr().err


@pytest.mark.slow  # starts the processes of a run
def test_two_processes_move_everything_once(base: Path, origin: CountingOrigin) -> None:
    lines = ["task: sft", f"model: {origin.url}/m", f"data: {origin.url}/rows.jsonl", "epochs: 2", "output: run"]
    lines += ["train: {batch: 4, seq_len: 64, precision: fp32}", "evaluate: {fraction: 0.0}", "parallel: {data: 2}"]
    (base / "job.yaml").write_text("\n".join(lines) + "\n")
    # A process of its own: the server that workers are forked from keeps the variables of whoever started it first.
    subprocess.run([sys.executable, "-m", "stoker", "train", "job.yaml"], cwd=base, check=True, capture_output=True)
    assert origin.sent == {name: len(origin.objects[name]) for name in origin.sent}
    last = [json.loads(line) for line in (base / "run" / "events.jsonl").read_text().splitlines()][-1]
    assert last["cache_origin_bytes"] == origin.total
