"""The stages of a job on the page: what each needs, and how its run stands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from browsing import Browser, make_run
from filelock import FileLock

from stoker.page.processes.job_queue import JobQueue
from stoker.page.run_data.run_index import id_of


def test_stages_are_done_running_failed_or_wait(page: Browser, tmp_path: Path) -> None:
    job = tmp_path / "runs" / "align"
    stages = [("sft", "sft", []), ("reward", "reward", ["sft"]), ("ppo", "ppo", ["reward", "sft"])]
    for name in ("sft", "reward"):
        make_run(job / name)
    record = [{"name": name, "run": f"runs/align/{name}", "task": task, "needs": needs} for name, task, needs in stages]
    (job / "stages.json").write_text(json.dumps(record))
    events = job / "reward" / "events.jsonl"
    events.write_text(events.read_text().splitlines()[0] + "\n" + json.dumps({"event": "failed", "time": 9}) + "\n")
    page.page.runs.forget()
    runs = {run["name"]: run for run in page.get("/api/runs").json()["runs"]}
    assert runs["reward"]["parents"] == [runs["sft"]["id"]] and runs["sft"]["parents"] == []
    found = page.get(f"/api/runs/{runs['sft']['id']}").json()["stages"]
    assert [(stage["name"], stage["status"], stage["needs"]) for stage in found] == [
        ("sft", "done", []),
        ("reward", "failed", ["sft"]),
        ("ppo", "waiting", ["reward", "sft"]),
    ]
    assert found[0]["id"] == runs["sft"]["id"] and found[1]["id"] == runs["reward"]["id"]
    make_run(tmp_path / "runs" / "alone")
    page.page.runs.forget()
    alone = next(run["id"] for run in page.get("/api/runs").json()["runs"] if run["name"] == "alone")
    assert page.get(f"/api/runs/{alone}").json()["stages"] == []


def test_a_stage_with_an_output_of_its_own_is_in_the_chain(page: Browser, tmp_path: Path) -> None:
    job = tmp_path / "runs" / "align"
    first, second = make_run(job / "sft"), make_run(tmp_path / "runs" / "apart" / "reward")
    record = [
        {"name": "sft", "run": "runs/align/sft", "folder": "sft", "task": "sft", "needs": []},
        {"name": "score", "run": "runs/apart/reward", "folder": "../apart/reward", "task": "reward", "needs": ["sft"]},
    ]
    (job / "stages.json").write_text(json.dumps(record))
    (second / "lineage.json").write_text(json.dumps({"stages": "../../align"}))
    stranger = make_run(tmp_path / "runs" / "stranger")
    (stranger / "lineage.json").write_text(json.dumps({"stages": "../align"}))  # that job does not name it
    page.page.runs.forget()
    runs = {run["name"]: run for run in page.get("/api/runs").json()["runs"]}
    for run in (first, second):
        found = page.get(f"/api/runs/{id_of(run)}").json()["stages"]
        assert [(stage["name"], stage["status"], stage["id"]) for stage in found] == [
            ("sft", "done", id_of(first)),
            ("score", "done", id_of(second)),
        ]
    assert runs["reward"]["parents"] == [id_of(first)] and runs["stranger"]["parents"] == []
    assert page.get(f"/api/runs/{id_of(stranger)}").json()["stages"] == []


def test_a_job_with_stages_has_their_progress_to_its_end(page: Browser, tmp_path: Path) -> None:
    root, queue = tmp_path / "runs" / "align", page.page.queue
    queue.start_starter = lambda: None  # type: ignore[method-assign]
    queue.add(["true"], cwd=tmp_path, run=root, job=tmp_path / "x", command="", user="me", name="align")
    path, ((_, process),) = f"/api/runs/{id_of(root)}", queue.entries()
    assert page.get(path).json()["status"] == "queued"
    root.mkdir()
    record = [{"name": name, "run": f"runs/align/{name}", "task": name, "needs": []} for name in ("sft", "dpo")]
    (root / "stages.json").write_text(json.dumps(record))
    make_run(root / "sft")
    (process.folder / "begun.json").write_text(json.dumps({"time": 1.0}))
    found = page.get(path).json()
    assert (found["step"], found["steps"]) == (1, 2)
    assert [stage["status"] for stage in found["stages"]] == ["done", "waiting"]
    make_run(root / "dpo")
    (process.folder / "ended.json").write_text(json.dumps({"code": 0, "time": 2.0}))
    found = page.get(path).json()
    assert (found["status"], found["step"], found["steps"]) == ("done", 2, 2)
    (root / "dpo" / "events.jsonl").write_text(json.dumps({"event": "stopped", "time": 9}) + "\n")
    (process.folder / "ended.json").write_text(json.dumps({"code": 143, "time": 2.0}))
    (process.folder / "err").write_text("stopping after this step ...\n")
    found = page.get(path).json()
    assert (found["status"], found["error"]) == ("stopped", "")
    with FileLock(root / "dpo" / ".lock"):  # it goes on in a terminal
        assert page.get(path).json()["status"] == "running"
    (root / "dpo" / "events.jsonl").write_text(json.dumps({"event": "failed", "time": 9}) + "\n")
    (process.folder / "ended.json").write_text(json.dumps({"code": 1, "time": 2.0}))
    found = page.get(path).json()
    assert (found["status"], found["error"]) == ("failed", "stopping after this step ...\n")
    (root / "dpo" / "events.jsonl").write_text(json.dumps({"event": "started", "time": 9}) + "\n")
    (process.folder / "ended.json").unlink()
    (process.folder / "begun.json").write_text(json.dumps({"time": 1.0}))
    assert page.get(path).json()["status"] == "interrupted"


def test_a_job_with_stages_is_one_thing(page: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JobQueue, "start_starter", lambda _: None)
    text = "task: sft\nmodel: llama-3m\nstages:\n  - {name: sft, data: chatterbot-corpus}\n"
    text += "  - {name: more, data: chatterbot-corpus, model: {from: sft}}\n"
    begun = page.post("/api/jobs", {"yaml": text, "name": "chain"}).json()
    root, job = tmp_path / "runs" / "chain", f"/api/runs/{begun['id']}"

    def end(code: int) -> None:
        (page.page.queue.entries()[-1][1].folder / "ended.json").write_text(json.dumps({"code": code, "time": 2.0}))

    end(-15)  # it was stopped while the first stage was loading
    (root / "sft").mkdir(parents=True)
    record = [{"name": name, "run": f"runs/chain/{name}", "task": "sft", "needs": []} for name in ("sft", "more")]
    (root / "stages.json").write_text(json.dumps(record))
    found = page.get(job).json()
    assert (found["status"], found["error"]) == ("stopped", "")
    again = page.post(f"{job}/resume").json()
    assert (again["command"], again["id"]) == (begun["command"], begun["id"])
    assert page.get(job).json()["status"] == "queued" and page.post(f"{job}/delete").status_code == 409
    end(143)
    (root / "sft").rmdir()
    stage = make_run(root / "sft")
    (stage / "events.jsonl").write_text((stage / "events.jsonl").read_text().replace('"done"', '"stopped"'))
    page.page.runs.forget()
    rows = {run["id"]: run for run in page.get("/api/runs").json()["runs"]}
    own = rows.pop(id_of(stage))
    assert own["stage_of"] == {"id": begun["id"], "name": "chain"} and rows.keys() == {begun["id"]}
    row = rows[begun["id"]]
    assert (row["status"], row["stage"], row["step"], row["steps"], row["loss"]) == ("stopped", "sft", 0, 2, 0.2)
    again = page.post(f"/api/runs/{id_of(stage)}/resume").json()  # the job goes on, not this stage alone
    assert (again["command"], again["id"]) == (begun["command"], begun["id"])
    found = page.get(f"/api/runs/{id_of(stage)}").json()
    assert (found["command"], found["status"]) == (begun["command"], "queued")
    assert page.post(f"/api/runs/{id_of(stage)}/stop").json() == {"command": "stoker stop runs/chain", "gone": False}
    assert page.get(job).json()["status"] == "stopped"
    assert page.post(f"{job}/delete").status_code == 200 and not root.exists()
    assert page.get("/api/runs").json()["runs"] == [] and page.get(job).status_code == 404
    (undo,) = page.get("/api/removed").json()["runs"]
    page.post(f"/api/removed/{undo['undo']}/restore")
    assert page.get(job).json()["status"] == "stopped"


def test_a_killed_run_is_not_all_right(page: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "one")
    page.page.runs.forget()
    path = f"/api/runs/{id_of(run)}"

    def faults() -> tuple[str, str]:
        found = next(each for each in page.get(path).json()["health"] if each["what"] == "faults")
        return found["level"], found["key"]

    assert faults() == ("ok", "health.faults.ok")
    (run / "events.jsonl").write_text((run / "events.jsonl").read_text().splitlines()[0] + "\n")  # it has no end
    assert faults() == ("warn", "health.faults.interrupted")
    with (run / "events.jsonl").open("a") as file:
        file.write(json.dumps({"event": "interrupted", "time": 9, "error": "KeyboardInterrupt: "}) + "\n")
    assert faults() == ("warn", "health.faults.warn")  # it wrote why


def test_a_killed_run_that_waits_to_go_on_is_not_to_be_resumed(
    page: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(JobQueue, "start_starter", lambda _: None)
    run = make_run(tmp_path / "runs" / "one")
    (run / "events.jsonl").write_text((run / "events.jsonl").read_text().splitlines()[0] + "\n")
    page.page.runs.forget()
    path = f"/api/runs/{id_of(run)}"
    assert page.post(f"{path}/resume").status_code == 200
    found = page.get(path).json()
    assert found["status"] == "queued" and all(each["what"] != "faults" for each in found["health"])


@pytest.mark.parametrize(
    "record",
    [
        "[" * 100_000,
        '[{"name": "a", "run": 5, "task": "sft", "needs": []}]',
        '[{"name": ["a"], "run": "runs/align/one", "task": "sft", "needs": {}}]',
        '[{"name": "a", "run": "runs/align/one", "task": "sft", "needs": [[]]}]',
        '[7, null, {"name": "a"}]',
        '{"name": "a"}',
        "7",
    ],
)
def test_a_damaged_record_of_stages_hides_no_run(page: Browser, tmp_path: Path, record: str) -> None:
    make_run(tmp_path / "runs" / "align" / "one")
    (tmp_path / "runs" / "align" / "stages.json").write_text(record)
    bad = make_run(tmp_path / "runs" / "bad")
    deep = "[" * 100_000 + "\n"
    (bad / "metrics.jsonl").write_text(deep + '{"step": "x", "seconds": "x", "loss": []}\n')
    (bad / "events.jsonl").write_text(deep + '{"event": "started", "time": [], "steps": {}}\n')
    for name in ("plan.json", "lineage.json", "environment.json"):
        (bad / name).write_text(deep)
    page.page.runs.forget()
    runs = {run["name"]: run for run in page.get("/api/runs").json()["runs"]}
    assert runs.keys() == {"one", "bad"} and runs["one"]["parents"] == []
    for run in runs.values():
        found = page.get(f"/api/runs/{run['id']}")
        assert found.status_code == 200 and found.json()["stages"] == []
