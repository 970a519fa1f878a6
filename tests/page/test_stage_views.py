"""The stages of a job on the page: what each needs, and how its run stands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from browsing import Browser, make_run


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
