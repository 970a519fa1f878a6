"""A page that is killed while runs go on: they lose nothing, wait for nobody, and are found again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from browsing import PATIENCE, eventually

pytestmark = pytest.mark.slow  # trains twice while the page starts again and again
STEPS = 120
LONGER = 400  # steps of a run that is still training when the next page has started
JOB = """
task: sft
model: llama-3m
data: data/rows.jsonl
steps: {steps}
train: {{batch: 4, seq_len: 64, precision: fp32, lr: 1e-3}}
evaluate: {{fraction: 0.2, every: 1000}}
checkpoint: {{every: 1000}}
"""


class Page:
    """A page in a process of its own, and a browser on it."""

    def __init__(self, folder: Path) -> None:
        words = ["ui", "--port", "0", "--state", "state", "--data", "data"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "stoker", *words], cwd=folder, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().removeprefix("listening on ").strip()
        self.client = httpx2.Client(base_url=self.url, timeout=PATIENCE)
        self.headers = {"origin": self.url, "x-stoker-csrf": self.get("/api/me")["csrf"]}

    def get(self, path: str) -> Any:
        return self.client.get(path).raise_for_status().json()

    def post(self, path: str, body: Any = None) -> Any:
        return self.client.post(path, json=body, headers=self.headers).raise_for_status().json()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.client.close()


@contextmanager
def page_in(folder: Path) -> Iterator[Page]:
    page = Page(folder)
    try:
        yield page
    finally:
        page.kill()


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A folder with rows; what still runs there in the end is ended."""
    (tmp_path / "data").mkdir()
    rows = ({"prompt": f"What is {n}?", "completion": f"It is {n}."} for n in range(40))
    (tmp_path / "data" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    yield tmp_path
    for process in psutil.process_iter(["cmdline", "cwd"]):
        if process.info["cwd"] == str(tmp_path) or str(tmp_path) in " ".join(process.info["cmdline"] or ()):
            process.kill()


def steps_of(run: Path) -> list[int]:
    path = run / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.is_file() else []


def events_of(run: Path) -> list[str]:
    path = run / "events.jsonl"
    return [json.loads(line)["event"] for line in path.read_text().splitlines()] if path.is_file() else []


@pytest.mark.parametrize("times", [2, 10])
@pytest.mark.often("2")
def test_a_killed_page_costs_a_run_no_step_and_the_queue_goes_on(times: int, home: Path) -> None:
    first, second = home / "runs" / "first", home / "runs" / "second"
    with page_in(home) as page:
        begun = page.post("/api/jobs", {"yaml": JOB.format(steps=LONGER), "name": "first"})
        page.post("/api/jobs", {"yaml": JOB.format(steps=20), "name": "second"})
        eventually(lambda: len(steps_of(first)) >= 2)
        states = [job["state"] for job in page.get("/api/queue")["jobs"]]
        assert states == ["running", "waiting"]
    seen = []
    for _ in range(times - 1):
        with page_in(home) as page:
            seen.append(page.get(f"/api/runs/{begun['id']}")["status"])
    assert "running" in seen and set(seen) <= {"running", "done"}
    eventually(lambda: "done" in events_of(second))  # nobody watches
    assert steps_of(first) == list(range(1, LONGER + 1))
    assert steps_of(second) == list(range(1, 21))
    for run in (first, second):
        names = events_of(run)
        assert names.count("started") == 1 and not {"resumed", "stopped", "failed", "interrupted"} & set(names)
    assert not (first / "repeated.jsonl").exists()
    with page_in(home) as page:
        found = eventually(lambda: [job for job in page.get("/api/queue")["jobs"] if job["code"] == 0][1:])
        assert [job["name"] for job in found] == ["second"]


@pytest.mark.exhaustive  # `browser/test_flows.py` does the same with clicks
def test_a_run_that_was_stopped_goes_on_with_every_step(home: Path) -> None:
    run = home / "runs" / "mine"
    with page_in(home) as page:
        key = page.post("/api/jobs", {"yaml": JOB.format(steps=STEPS), "name": "mine"})["id"]
        eventually(lambda: len(steps_of(run)) >= 3)
        assert page.post(f"/api/runs/{key}/stop")["command"] == "stoker stop runs/mine"
        eventually(lambda: page.get(f"/api/runs/{key}")["status"] == "stopped")
        before = len(steps_of(run))
        assert before < STEPS
        again = page.post(f"/api/runs/{key}/resume")
        assert again["command"].startswith("stoker train state/jobs/mine-1.yaml")
    eventually(lambda: "done" in events_of(run))
    assert steps_of(run) == list(range(1, STEPS + 1))
    assert events_of(run).count("resumed") == 1


@pytest.mark.exhaustive
def test_a_run_is_talked_to_until_the_page_ends(home: Path) -> None:
    with page_in(home) as page:
        body = {"yaml": JOB.format(steps=2) + "tune: {method: lora, rank: 2}\n", "name": "talks"}
        key = page.post("/api/jobs", body)["id"]
        eventually(lambda: page.get(f"/api/runs/{key}")["status"] == "done")
        for adapter in (True, False):
            asked = {"run": key, "adapter": adapter, "max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]}
            with page.client.stream("POST", "/api/chat", json=asked, headers=page.headers, timeout=PATIENCE) as answer:
                found = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: ")]
            assert found[-1].get("done"), found
        children = psutil.Process(page.process.pid).children(recursive=True)
        assert not [child for child in children if child.status() == psutil.STATUS_ZOMBIE]
        assert any("serve" in child.cmdline() for child in children)
    _, alive = psutil.wait_procs(children, timeout=PATIENCE)
    assert not alive  # a killed page leaves no model in memory
