"""Metrics in TensorBoard, Weights & Biases (offline) and MLflow (a local folder), over a run that is resumed."""

from __future__ import annotations

import json
import struct
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running import write_job

from stoker.cli.main import main
from stoker.job.load_job import load_job
from stoker.train.step_hooks.tracked_metrics import settings_of, tracking_hook

pytestmark = pytest.mark.slow  # imports of the trackers take seconds
BLOCK = 1 << 15
WORDS = ("steps=2", "faults.restarts=0", "train.schedule=constant", "evaluate.every=2", "evaluate.fraction=0.2")


@pytest.fixture
def train(base: Path, sft: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Trains in this process and returns the steps and held-out losses that the run itself has recorded."""
    monkeypatch.chdir(base)
    write_job(base, sft)

    def run(*words: str) -> tuple[dict[int, float], dict[int, float]]:
        assert main(["train", "job.yaml", *WORDS, *words]) == 0
        steps = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
        events = [json.loads(line) for line in Path("run/events.jsonl").read_text().splitlines()]
        held_out = {event["step"]: event["loss"] for event in events if event["event"] == "evaluated"}
        return {line["step"]: line["loss"] for line in steps}, held_out

    return run


def test_trackers_get_finite_numbers_alone() -> None:
    sent: list[tuple[int, dict[str, float]]] = []
    hook = tracking_hook(lambda numbers, step: sent.append((step, numbers)))
    figures = {"loss": float("nan"), "perplexity": float("inf"), "score": 0.5, "targets": 3, "unit": "answer"}
    hook.evaluated(7, {**figures, "byte_loss": None})
    assert sent == [(7, {"evaluate/score": 0.5, "evaluate/targets": 3.0})]


def test_trackers_get_no_secrets_of_urls(base: Path, sft: dict[str, Any]) -> None:
    data = "https://me:hunter2@host.example/rows.jsonl?signature=abc"
    write_job(base, {**sft, "data": data, "checkpoint": {"to": "s3://me:hunter2@bucket/runs"}})
    settings = settings_of(load_job(base / "job.yaml").job)
    assert settings["data[0].path"] == "https://host.example/rows.jsonl"
    assert settings["checkpoint.to"] == "s3://me@bucket/runs"


def test_tensorboard_has_steps_and_evaluations(train: Any) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train("train.tensorboard=true")
    losses, held_out = train("train.tensorboard=true", "steps=4")
    found = EventAccumulator("run/tensorboard").Reload()
    for name, wanted in (("train/loss", losses), ("evaluate/loss", held_out)):
        assert {e.step: e.value for e in found.Scalars(name)} == pytest.approx(wanted, rel=1e-6)


def records(file: Path) -> Iterator[bytes]:
    """The records of a file in LevelDB's log format, after seven bytes of Weights & Biases' own."""
    data, at, parts = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (room := BLOCK - at % BLOCK) < 7:
            at += room
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield parts
            parts = b""


def test_weights_and_biases_has_one_run_over_its_starts(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    train("train.wandb=ours")
    losses, held_out = train("train.wandb=ours", "steps=4")
    seen: dict[str, dict[int, float]] = defaultdict(dict)
    runs, settings = set(), {}
    for file in Path("run/wandb").glob("offline-run-*/*.wandb"):
        for record in map(Record.FromString, records(file)):
            if record.WhichOneof("record_type") == "run":
                runs.add((record.run.project, record.run.run_id, record.run.display_name))
                settings |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            items = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
            for name in items.keys() & {"train/loss", "evaluate/loss"}:
                seen[name][items["step"]] = items[name]
    assert seen == {"train/loss": losses, "evaluate/loss": held_out}
    assert runs == {("ours", Path("run/wandb/run_id").read_text().strip(), "run")}
    assert settings["train.batch"] == 4 and "train.warmup" in settings


def test_mlflow_has_one_run_over_its_starts(train: Any, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", (base / "server").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    train("train.mlflow=ours")
    losses, held_out = train("train.mlflow=ours", "steps=4")
    client = MlflowClient()
    experiment = client.get_experiment_by_name("ours")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    for name, wanted in (("train/loss", losses), ("evaluate/loss", held_out)):
        assert {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, name)} == wanted
    assert run.info.run_name == "run" and run.data.params["train.batch"] == "4" and run.info.status == "FINISHED"


@pytest.mark.parametrize("key", ["wandb", "mlflow"])
def test_a_tracker_that_is_not_installed_is_named(
    key: str, base: Path, sft: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(base)
    monkeypatch.setitem(sys.modules, key, None)
    write_job(base, sft)
    assert main(["train", "job.yaml", *WORDS, f"train.{key}=ours"]) == 2
    assert f"train.{key} needs the package {key}" in (error := capsys.readouterr().err)
    assert f"pip install 'stoker[{key}]'" in error


def test_a_tracker_that_cannot_begin_a_run_is_named_with_what_to_set(
    train: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import wandb

    for name in ("WANDB_API_KEY", "WANDB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(Path.cwd()))  # where a key may lie
    wandb.teardown()  # it reads the environment once
    for key, advice in (("wandb", "set WANDB_MODE=offline"), ("mlflow", "set MLFLOW_TRACKING_URI")):
        assert main(["train", "job.yaml", *WORDS, f"train.{key}=ours"]) == 2
        assert f"train.{key}: " in (error := capsys.readouterr().err) and advice in error
