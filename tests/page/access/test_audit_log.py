"""An action that ends, removes or changes something does not take place if the audit log cannot be written."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from browsing import Browser, eventually, make_run

from stoker.page.access.audit_log import AuditLog
from stoker.page.processes import model_servers
from stoker.page.processes.detached_process import DetachedProcess
from stoker.page.routes import job_routes
from stoker.page.run_data.run_index import id_of


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes every later line of the log fail."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("the disk is full")

    return lambda: monkeypatch.setattr(AuditLog, "write", refuse)


def test_an_upload_stays_on_the_list(page: Browser, full: Callable[[], None]) -> None:
    key = page.post("/api/uploads", {"name": "rows.jsonl", "size": 0}).json()["id"]
    full()
    assert page.send("DELETE", f"/api/data/{key}").status_code == 500
    assert page.get(f"/api/uploads/{key}").status_code == 200


def test_a_user_is_not_added(make_page: Callable[..., Browser], tmp_path: Path, full: Callable[[], None]) -> None:
    page = make_page(users=True).login("boss")
    full()
    assert page.post("/api/users", {"name": "new", "role": "see"}).status_code == 500
    assert "new see" not in (tmp_path / "users").read_text()


def test_a_run_trains_on(
    page: Browser, tmp_path: Path, full: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "runs" / "one")
    page.page.runs.forget()
    with subprocess.Popen(["sleep", "60"]) as process:
        monkeypatch.setattr(job_routes, "holder_of", lambda _: psutil.Process(process.pid))
        full()
        assert page.post(f"/api/runs/{id_of(run)}/stop").status_code == 500
        assert process.poll() is None
        process.kill()


def test_a_server_stays_and_has_no_new_key(
    page: Browser, tmp_path: Path, full: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_servers, "command_of", lambda _: ["sleep", "60"])
    make_run(tmp_path / "runs" / "one")
    page.page.runs.forget()
    (run,) = page.page.runs.all()
    key = page.post("/api/servers", {"run": run}).json()["id"]
    place = tmp_path / "state" / "servers" / key
    process = eventually(lambda: DetachedProcess(place).process)
    full()
    try:
        assert page.post(f"/api/servers/{key}/keys", {"name": "shop"}).status_code == 500
        assert (place / "keys").read_text() == ""
        assert page.post(f"/api/servers/{key}/stop").status_code == 500
        assert process.is_running()
    finally:
        process.kill()
    eventually(lambda: DetachedProcess(place).state == "ended")
    assert page.send("DELETE", f"/api/servers/{key}").status_code == 500
    assert place.is_dir()
