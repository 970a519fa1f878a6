"""A browser on a page that is asked in this process, and made-up runs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
from starlette.testclient import TestClient

from stoker.page.app import application, page_of
from stoker.page.page_settings import PageSettings

TOKENS = {
    "viewer": "viewer-token-of-20-characters",
    "runner": "runner-token-of-20-characters",
    "boss": "boss-token-of-a-test",
}
ROLES = {"viewer": "see", "runner": "run", "boss": "admin"}
PORT = 7860
PATIENCE = 300.0  # seconds within which what a test waits for comes, on a machine with much else to do
HOST = f"127.0.0.1:{PORT}"


class Browser:
    """A client that sends what a browser on the page sends."""

    def __init__(self, settings: PageSettings) -> None:
        self.settings = settings
        self.page = page_of(settings)
        self.client = TestClient(application(self.page), base_url=f"http://{HOST}", raise_server_exceptions=False)
        self.csrf = ""

    def get(self, path: str, **more: Any) -> httpx2.Response:
        return self.client.get(path, **more)

    def send(self, method: str, path: str, body: Any = None, **more: Any) -> httpx2.Response:
        headers = {"origin": f"http://{HOST}", "x-stoker-csrf": self.csrf, **more.pop("headers", {})}
        return self.client.request(method, path, json=body, headers=headers, **more)

    def post(self, path: str, body: Any = None, **more: Any) -> httpx2.Response:
        return self.send("POST", path, body, **more)

    def begin(self) -> Browser:
        """Takes the session of a page without a token."""
        self.csrf = self.get("/api/me").json()["csrf"]
        return self

    def login(self, name: str) -> Browser:
        self.csrf = self.post("/api/login", {"token": TOKENS[name]}).json()["csrf"]
        return self


def eventually(found: Callable[[], Any], what: str = "") -> Any:
    """The first value that is true."""
    end = time.monotonic() + PATIENCE
    while not (value := found()):
        assert time.monotonic() < end, f"it took too long: {what}"
        time.sleep(0.02)
    return value


def make_run(folder: Path, steps: int = 5, **started: Any) -> Path:
    """A run's folder as training leaves it: losses 1, 1/2, 1/3 ..."""
    folder.mkdir(parents=True)
    (folder / "job.yaml").write_text("task: sft\nmodel: llama-3m\ndata: rows.jsonl\nsteps: 5\n")
    begun = {"time": 100.0, "event": "started", "task": "sft", "model": "llama-3m", "steps": steps, **started}
    events = [begun, {"time": 100.0 + steps, "event": "done", "step": steps}]
    (folder / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in events))
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            line = {"step": step, "loss": 1 / step, "grad_norm": 1.0, "lr": 1e-3, "tokens": 10, "seconds": 1.0}
            line |= {"time": 100.0 + step, "data_seconds": 0.0, "stall": 0.0, "tokens_per_s": 10.0, "memory_gib": 1.0}
            file.write(json.dumps(line) + "\n")
    return folder
