"""Runs that go on with changed keys: what is refused, and the command that is recorded."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from browsing import Browser, make_run

from stoker.cli.main import main
from stoker.page.processes.job_queue import JobQueue
from stoker.page.processes.run_verb import VerbResult, Verbs, printed_json
from stoker.page.run_data.run_index import id_of
from stoker.runs.run_folder import RunFolder

JOB = "task: sft\nmodel: llama-3m\ndata: chatterbot-corpus\nsteps: 5\n"
STATEFUL = '{"time": 104.0, "event": "saved", "where": "disk", "step": 4}\n'


@pytest.fixture
def unstarted(page: Browser, monkeypatch: pytest.MonkeyPatch) -> Browser:
    """A page whose queue nobody works off, and whose verbs run in this process."""

    async def run_here(_: Verbs, arguments: Sequence[str], _seconds: float, cwd: Path) -> VerbResult:
        out = io.StringIO()
        with contextlib.chdir(cwd), contextlib.redirect_stdout(out):
            code = main(list(arguments))
        return VerbResult(code, printed_json(out.getvalue()), "")

    monkeypatch.setattr(JobQueue, "start_starter", lambda _: None)
    monkeypatch.setattr(Verbs, "_run", run_here)
    return page


def saved_run(folder: Path) -> Path:
    """A run with a checkpoint."""
    run = make_run(folder)
    (run / "job.yaml").write_text(JOB)
    with RunFolder(run).events.open("a") as file:
        file.write(STATEFUL)
    return run


def test_a_run_goes_on_with_what_it_accepts(unstarted: Browser, tmp_path: Path) -> None:
    run = saved_run(tmp_path / "runs" / "one")
    job = tmp_path / "state" / "jobs" / "one-1.yaml"
    job.write_text(JOB)
    command = "stoker train state/jobs/one-1.yaml output=runs/one steps=6"
    unstarted.page.queue.add(["true"], cwd=tmp_path, run=run, job=job, command=command, user="local", name="one")
    ((_, process),) = unstarted.page.queue.entries()
    (process.folder / "ended.json").write_text('{"code": 0}')
    unstarted.page.runs.forget()
    path = f"/api/runs/{id_of(run)}/resume"
    found = unstarted.post(f"{path}-check", {"changes": ["steps=9", "train.lr=0.5"]}).json()
    assert found["problems"] == []
    assert found["accepted"] == [{"key": "steps", "before": "5", "after": "9"}]
    assert [(each["key"], each["after"]) for each in found["refused"]] == [("train.lr", "0.5")]
    refused = unstarted.post(path, {"changes": ["steps=9", "train.lr=0.5"]})
    error = refused.json()["error"]
    assert (refused.status_code, error["message"]) == (409, "the run cannot go on with other values of `train.lr`")
    assert len(unstarted.page.queue.entries()) == 1
    answer = unstarted.post(path, {"changes": ["steps=9"]}).json()
    assert answer["command"] == "stoker train state/jobs/one-1.yaml output=runs/one steps=9"
    (_, (entry, _)) = unstarted.page.queue.entries()
    assert (entry.run, entry.command) == (str(run), answer["command"])
    assert "steps=9" in unstarted.get("/api/script").text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("steps=9", "`changes` must be a list of at most 100 texts"),
        ([1], "`changes` must be a list of at most 100 texts"),
        (["steps"], "`steps` does not change a key"),
        (["--fresh=1"], "`--fresh=1` does not change a key"),
        (["output=runs/two"], "a run goes on in its own folder"),
        (["evaluate.data=/etc/passwd"], "`/etc/passwd` is not in a folder that this page may use"),
        (["steps[=1"], "in `steps[=1`: "),
    ],
)
def test_wrong_changes_are_refused(unstarted: Browser, tmp_path: Path, changes: Any, message: str) -> None:
    run = saved_run(tmp_path / "runs" / "one")
    unstarted.page.runs.forget()
    refused = unstarted.post(f"/api/runs/{id_of(run)}/resume", {"changes": changes})
    assert refused.status_code == 400 and refused.json()["error"]["message"].startswith(message), refused.text
    assert not unstarted.page.queue.entries()


def test_a_misspelt_key_is_found_with_its_nearest(unstarted: Browser, tmp_path: Path) -> None:
    run = saved_run(tmp_path / "runs" / "one")
    unstarted.page.runs.forget()
    found = unstarted.post(f"/api/runs/{id_of(run)}/resume-check", {"changes": ["stps=9"]}).json()
    (problem,) = found["problems"]
    assert "stps" in problem["message"] and "steps" in problem["hint"]


def test_a_job_with_stages_goes_on_without_changes(unstarted: Browser, tmp_path: Path) -> None:
    run = saved_run(tmp_path / "runs" / "one")
    (run / "job.yaml").write_text("stages: []\n")
    unstarted.page.runs.forget()
    refused = unstarted.post(f"/api/runs/{id_of(run)}/resume", {"changes": ["steps=9"]})
    assert refused.json()["error"]["message"] == "a job with stages goes on without changes"
