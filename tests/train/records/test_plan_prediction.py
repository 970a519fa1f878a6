"""Every run keeps what was predicted of it beside what was measured, and never fails over it."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean, median
from typing import Any

import pytest
from running import run, stop_at, watching, write_job

from stoker.cli.main import main
from stoker.job.document.job_to_yaml import scalar
from stoker.job.load_job import load_job
from stoker.runs.plan_record import read_comparison
from stoker.train.prepare import prepare
from stoker.train.records import plan_prediction
from stoker.train.task import Part


def test_a_run_is_predicted_and_measured(base: Path, sft: dict[str, Any]) -> None:
    positions: list[int] = []

    def count(first: int, last: int, parts: list[Part]) -> None:
        positions.append(sum(part.inputs.ids.numel() for part in parts))

    ran = run(base, {**sft, "steps": plan_prediction.MICRO_BATCHES}, before=watching(count))
    found = read_comparison(ran.folder)
    assert found is not None and found.predicted is not None and found.measured is not None
    lines = ran.folder.read_metrics()
    assert found.measured.steps == plan_prediction.MICRO_BATCHES - 2  # without the first two
    assert found.measured.seconds == median(line["seconds"] for line in lines[2:])
    assert found.measured.memory / 2**30 == pytest.approx(lines[-1]["memory_gib"], rel=0.05)
    said, audit = found.predicted, ran.prepared.audit
    assert audit is not None
    assert (said.layout, said.micro_batch, said.accumulation) == ("data 1", 4, 1)
    assert said.mean == pytest.approx(mean(positions) / 4)  # rows are not filled up to seq_len, and begin alike
    assert max(positions) / 4 <= said.longest + 0.5 <= audit.longest  # four are less uneven than each alone
    parameters = sum(p.numel() for p in ran.prepared.task.model.parameters())
    assert said.memory["weights"] == 4 * parameters  # counted from the configuration
    trained = sum(p.numel() for p in ran.prepared.task.model.parameters() if p.requires_grad)
    assert said.memory["checkpoint copies"] == 2 * 12 * trained  # with AdamW's two moments, twice
    assert said.peak == pytest.approx(sum(said.memory.values()))
    assert said.seconds == pytest.approx(sum(said.time.values()))


@pytest.mark.parametrize(("memory", "copied"), [("auto", False), (2, True), (0, False)])
def test_copies_in_memory_are_predicted_where_they_are_made(
    memory: Any, copied: bool, base: Path, sft: dict[str, Any]
) -> None:
    """Without restarts ``auto`` makes none, and a number still does."""
    checkpoint = {"background": False, "memory": memory}
    ran = run(base, {**sft, "steps": 1, "checkpoint": checkpoint, "faults": {"restarts": 0}})
    found = read_comparison(ran.folder)
    assert found is not None and found.predicted is not None
    assert (found.predicted.memory["checkpoint copies"] > 0) == copied


@pytest.mark.parametrize(("room", "copies"), [(9.0, 2), (2.0, 1), (1.0, 0), (-1.0, 0)])
def test_copies_are_predicted_where_there_is_room(
    room: float, copies: int, base: Path, sft: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In units of a copy; the saver leaves a fifth of the free memory alone."""
    prepared = prepare(load_job(write_job(base, {**sft, "steps": 1})), base)
    before = plan_prediction.predicted_for(prepared, 1, 1)
    one = before.memory["checkpoint copies"] / 2
    peak = before.peak - 2 * one
    monkeypatch.setattr(plan_prediction, "allocatable_bytes", lambda _: peak + room * one)
    found = plan_prediction.predicted_for(prepared, 1, 1)
    assert found.memory["checkpoint copies"] == copies * one and found.peak == pytest.approx(peak + copies * one)


def test_a_run_that_goes_on_is_measured_from_there(base: Path, sft: dict[str, Any]) -> None:
    run(base, {**sft, "steps": 4})
    ran = run(base, {**sft, "steps": 9})
    found = read_comparison(ran.folder)
    assert found is not None and found.measured is not None
    lines = ran.folder.read_metrics()
    assert len(lines) == 9 and found.measured.steps == 3
    assert found.measured.seconds == median(line["seconds"] for line in lines[6:])


def test_a_run_that_is_stopped_is_measured(base: Path, sft: dict[str, Any]) -> None:
    ran = run(base, sft, before=stop_at(20))
    assert ran.outcome.state == "stopped"
    found = read_comparison(ran.folder)
    assert found is not None and found.measured is not None


def test_a_planner_that_fails_does_not_fail_the_run(
    base: Path, sft: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("float division by zero")

    monkeypatch.setattr(plan_prediction, "step_time", broken)
    ran = run(base, {**sft, "steps": 2})
    assert ran.outcome.state == "done"
    found = read_comparison(ran.folder)
    assert found is not None
    assert found.line() == "predicted  unavailable: ZeroDivisionError: float division by zero"


def test_a_job_without_a_layout_is_planned_trained_and_told(
    base: Path, sft: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(base)
    monkeypatch.setattr("stoker.hardware.machines.detect_machine._visible_gpus", lambda: [])
    job = {**sft, "steps": 3, "parallel": "auto"}
    (base / "job.yaml").write_text("".join(f"{key}: {scalar(value)}\n" for key, value in job.items()))
    assert main(["check", "job.yaml"]) == 0
    assert "# 1 process: data 1; planner: the fastest that fits of" in capsys.readouterr().out
    assert main(["train", "job.yaml", "faults.restarts=0"]) == 0
    said = capsys.readouterr().out
    assert "planner: the fastest that fits of" in said
    assert [line for line in said.splitlines() if line.startswith("predicted") and "; measured " in line]
    kept = (base / "run" / "job.yaml").read_text()
    layout = kept.split("parallel:")[1].split("devices")[0].replace("compile: auto", "")
    assert "auto" not in layout  # the layout that was trained with
    assert main(["train", "job.yaml", "output=again", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)["plan"]
    assert answer["predicted"]["layout"] == "data 1"
    assert answer["line"].startswith("predicted ")
    assert answer["measured"]["seconds"] > 0
