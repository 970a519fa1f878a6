"""What is said of the runs below a folder, from what lies in theirs."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from stoker.cli.main import main
from stoker.runs.listing import list_runs, summarise
from stoker.runs.run_folder import RunFolder
from stoker.runs.step_metrics import MetricsWriter, StepMetrics


def run_at(path: Path, *ends: str, steps: int = 2) -> RunFolder:
    path.mkdir(parents=True)
    folder = RunFolder(path)
    folder.event("started", task="sft", model="tiny", steps=12)
    writer = MetricsWriter(folder)
    for step in range(1, steps + 1):
        writer.write(StepMetrics(step, 3.0 - step, 1.0, 1e-3, 64, 32, 100.0, 0.5, 0.64))
    writer.close()
    folder.event("evaluated", step=1, loss=2.5)
    folder.event("evaluated", step=2, loss=2.25)
    for end in ends:
        folder.event(end, step=steps)
    return folder


@pytest.mark.parametrize(
    ("ends", "state"),
    [
        (("done",), "done"),
        (("stopped",), "stopped"),
        (("failed",), "failed"),
        (("saved",), "interrupted"),  # killed: no word of its end
        (("interrupted",), "interrupted"),
        (("stopped", "resumed"), "interrupted"),
        (("stopped", "resumed", "done"), "done"),
        (("done", "exported"), "done"),
    ],
)
def test_states(ends: tuple[str, ...], state: str, tmp_path: Path) -> None:
    assert summarise(run_at(tmp_path / "run", *ends)).state == state


def test_a_taken_folder_is_running(tmp_path: Path) -> None:
    folder = run_at(tmp_path / "run", "stopped", "resumed")
    folder.write_job("task: sft\n")
    with folder.take():
        assert summarise(folder).state == "running"
    assert summarise(folder).state == "interrupted"


def test_a_summary_says_where_the_run_stands(tmp_path: Path) -> None:
    summary = summarise(run_at(tmp_path / "run", "done"))
    assert (summary.task, summary.model, summary.step, summary.steps) == ("sft", "tiny", 2, 12)
    assert (summary.loss, summary.held_out_loss) == (1.0, 2.25)
    assert 0 <= summary.age < 60


def test_runs_are_listed_newest_first_at_any_depth_and_never_written_to(tmp_path: Path) -> None:
    old, new = run_at(tmp_path / "a" / "old", "done"), run_at(tmp_path / "new", "done")
    hour_ago = time.time() - 3600
    for path in (old.events, old.metrics):
        os.utime(path, (hour_ago, hour_ago))
    before = {path: path.stat().st_mtime for path in tmp_path.rglob("*")}
    assert [run.path for run in list_runs(tmp_path)] == [str(new.path), str(old.path)]
    assert {path: path.stat().st_mtime for path in tmp_path.rglob("*")} == before
    assert list_runs(tmp_path / "nowhere") == []


def test_a_run_that_has_only_begun_or_is_foreign(tmp_path: Path) -> None:
    (tmp_path / "begun").mkdir()
    RunFolder(tmp_path / "begun").event("started", task="sft", model="tiny", steps=12)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "events.jsonl").write_text('{"what": 1}\n')
    begun = {Path(run.path).name: run for run in list_runs(tmp_path)}
    assert begun["begun"].step == 0 and begun["begun"].loss is None
    assert begun["foreign"].state == "interrupted"


def test_a_run_has_the_same_path_alone_and_among_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_at(tmp_path / "runs" / "one", "done").job.touch()
    monkeypatch.chdir(tmp_path)
    for words in ([], ["one"], ["runs/one"]):
        assert main(["runs", *words, "--json"]) == 0
        assert [run["path"] for run in json.loads(capsys.readouterr().out)] == ["runs/one"]


@pytest.mark.parametrize("name", ["events.jsonl", "metrics.jsonl"])
def test_a_run_that_cannot_be_read_does_not_hide_the_others(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_at(tmp_path / "good", "done")
    bad = run_at(tmp_path / "bad", "done").path / name
    bad.unlink()
    os.mkfifo(bad)
    assert {Path(run.path).name: run.state for run in list_runs(tmp_path)} == {"good": "done", "bad": "unreadable"}
    assert main(["runs", str(tmp_path)]) == 0
    assert capsys.readouterr().err == f"{bad} cannot be read: it is a FIFO, not a file\n"
    assert main(["runs", str(bad.parent)]) == 2


@pytest.mark.parametrize(
    ("events", "metrics"),
    [
        ("[" * 100_000, "[" * 100_000),
        ('{"event": "started", "steps": "x", "task": ["a"], "time": "x"}', '{"step": "x", "loss": "x", "time": {}}'),
        ('{"event": ["started"], "time": []}', f'{{"step": 1{"0" * 400}, "loss": [1]}}'),
        ('{"event": "evaluated", "loss": "x"}', '{"step": null, "loss": true}'),
        (
            '{"event": "resumed", "time": 5, "began": "x"}\n{"event": "evaluated", "time": 6, "seconds": []}',
            '{"step": [], "time": 7, "seconds": 1}',
        ),
        ("7\n[]\nnull", "7\n[]\nnull"),
    ],
)
def test_a_run_with_damaged_lines_is_listed_with_the_others(tmp_path: Path, events: str, metrics: str) -> None:
    run_at(tmp_path / "good", "done")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "events.jsonl").write_text(events + "\n")
    (tmp_path / "bad" / "metrics.jsonl").write_text(metrics + "\n")
    found = {Path(run.path).name: run for run in list_runs(tmp_path)}
    assert found.keys() == {"good", "bad"} and found["good"].state == "done"
    bad = found["bad"]
    assert (bad.state, bad.step, bad.steps, bad.loss, bad.held_out_loss) == ("interrupted", 0, 0, None, None)
