"""Runs whose newest checkpoint is an increment: they grow, are exported and survive faults as from a whole one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click_logs import ranking_job
from running import run, write_job

from stoker.checkpoint.dcp_store import Store
from stoker.checkpoint.rows_by_id import rows_by_id
from stoker.cli.main import main
from stoker.runs.run_folder import RunFolder
from stoker.train.ranking import exported_tower

TABLE = {"admission": {"count": 2}, "eviction": {"age": 3, "every": 2}}
TRAIN = {"batch": 12, "lr": 1e-2, "precision": "fp64", "warmup": 0, "schedule": "constant"}


def job_of(output: str, full_every: int, **changes: Any) -> dict[str, Any]:
    checkpoint = {"every": 1, "best": False, "memory": 0, "keep": 20, "full_every": full_every}
    block = {"table": TABLE, **changes.pop("ranking", {})}
    return ranking_job(output=output, checkpoint=checkpoint, train=TRAIN, ranking=block, **changes)


def assert_same_rows(one: Store, other: Store, step: int) -> None:
    rows, others = (rows_by_id(store.load(step).tensors) for store in (one, other))
    assert rows.keys() == others.keys() and len(rows["user_id/ids"])
    assert all(torch.equal(rows[name], others[name]) for name in rows)


@pytest.mark.slow  # three runs with a checkpoint in every step
def test_a_log_that_grows_goes_on_from_an_increment(clicks: Path) -> None:
    lines = (clicks / "clicks.jsonl").read_text().splitlines(keepends=True)
    for day in (1, 2, 3):
        (clicks / f"day_{day}.jsonl").write_text("".join(lines[60 * (day - 1) : 60 * day]))

    def grown(output: str, full_every: int, days: int) -> dict[str, Any]:
        changes = {"ranking": {"progressive": True, "ignore": ["bought", "timestamp"]}, "evaluate": {}}
        job = job_of(output, full_every, **changes)
        job["data"] = "new/*.jsonl"
        (clicks / "new").mkdir(exist_ok=True)
        for day in range(1, 4):
            (clicks / "new" / f"day_{day}.jsonl").unlink(missing_ok=True)
        for day in range(1, days + 1):
            (clicks / "new" / f"day_{day}.jsonl").write_text((clicks / f"day_{day}.jsonl").read_text())
        return {**{key: value for key, value in job.items() if key not in ("steps", "evaluate")}, "epochs": 1}

    first = run(clicks, grown("grown", 4, 2))
    assert first.outcome.step == 10 and first.store.numbers(10).get("base") == 9
    later = run(clicks, grown("grown", 4, 3))
    whole = run(clicks, grown("whole", 1, 3))
    assert later.loop.resumed_from == "disk" and later.losses == whole.losses and later.outcome.step == 15
    assert later.store.numbers(14).get("base") == 11
    for step in (14, 15):
        assert_same_rows(later.store, whole.store, step)


@pytest.mark.slow  # two runs with a checkpoint in every step, each exported and replayed
@pytest.mark.usefixtures("in_process_replay")
def test_an_export_of_an_increment_is_that_of_a_whole_checkpoint(clicks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exported_tower, "ONNX_PACKAGES", ("onnx_of_nobody",))
    for name, full_every in (("whole", 1), ("changed", 4)):
        run(clicks, job_of(name, full_every))
        assert main(["export", name, "--format", "ranking", "--to", f"{name}-exported"]) == 0
    assert Store(clicks / "changed" / "checkpoints").numbers(6).get("base") == 5
    files = [
        {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.safetensors")}
        for folder in (clicks / "whole-exported", clicks / "changed-exported")
    ]
    assert files[0] == files[1] and any("tables" in name for name in files[0])
    manifests = [
        json.loads((clicks / f"{name}-exported" / "manifest.json").read_text()) for name in ("whole", "changed")
    ]
    own = [[manifest.pop(key) for key in ("run", "made", "id")] for manifest in manifests]
    assert [name for name, *_ in own] == ["whole", "changed"] and manifests[0] == manifests[1]


@pytest.mark.exhaustive  # chaos runs a job twice, in processes of its own
def test_chaos_goes_on_from_increments(clicks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = {**job_of("calm", 4, steps=15), "faults": {"restarts": 5, "back_off": 0.1, "check": False}}
    write_job(clicks, job)
    assert main(["chaos", "job.yaml", "parallel.data=2", "--kill", "1@7", "--kill", "0@12"]) == 0
    assert "equal" in capsys.readouterr().out
    runs = [RunFolder(path.parent) for path in clicks.rglob("events.jsonl")]
    resumed = [event["step"] for folder in runs for event in folder.read_events() if event["event"] == "resumed"]
    stores = [Store(folder.checkpoints) for folder in runs]
    assert resumed and any(
        store.numbers(step).get("base") for store in stores for step in resumed if step in store.steps()
    )
