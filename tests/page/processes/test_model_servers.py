"""Servers of models that the page starts: their folders, who may do what with them, and what their metrics say."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from browsing import Browser, eventually, make_run

from stoker.page.processes import model_servers
from stoker.page.processes.detached_process import DetachedProcess
from stoker.page.processes.server_traffic import quantile, traffic_of
from stoker.serve.metrics import Metrics
from stoker.serve.named_keys import hash_of

# In the place of `stoker serve`: it says what it was asked to serve, listens, and answers for its models.
SERVER = """
import json, pathlib, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
words = sys.argv[2:]
token = pathlib.Path(words[words.index("--token-file") + 1]).read_text()
models = [word.partition("=")[0] for word in words if "=" in word]
class Handler(BaseHTTPRequestHandler):
    def answer(self, status, value):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())
    def do_GET(self):
        if self.headers["authorization"] != "Bearer " + token:
            return self.answer(401, {})
        self.answer(200, {"data": [{"id": name, "parent": "base"} for name in models]})
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if body["lora_name"] == "bad":
            return self.answer(400, {"error": {"message": "it does not fit the base"}})
        change = models.append if self.path.endswith("/load_lora_adapter") else models.remove
        change(body["lora_name"])
        self.answer(200, {})
    def log_message(self, *_):
        pass
if "fails" in models:
    sys.exit("error: there is no base")
server = HTTPServer(("127.0.0.1", int(words[words.index("--port") + 1])), Handler)
print(f"models: {models}\\nlistening on http://127.0.0.1:{server.server_port}", flush=True)
server.serve_forever()
"""


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Starts the server above, and ends what a test has left."""
    file = tmp_path / "server.py"
    file.write_text(SERVER)
    monkeypatch.setattr(model_servers, "command_of", lambda words: [sys.executable, str(file), *words])
    yield
    for place in (tmp_path / "state" / "servers").glob("*"):
        while DetachedProcess(place).state == "starting":
            time.sleep(0.02)
        DetachedProcess(place).stop(signal.SIGKILL)


def id_of_run(page: Browser, name: str) -> str:
    page.page.runs.forget()
    return next(run["id"] for run in page.get("/api/runs").json()["runs"] if run["name"] == name)


def wait(page: Browser, server: str, status: str) -> dict[str, Any]:
    def found() -> dict[str, Any] | None:
        one: dict[str, Any] = page.get(f"/api/servers/{server}").json()
        return one if one["status"] == status else None

    return dict(eventually(found, status))


def begun(page: Browser, tmp_path: Path, name: str = "one", **more: Any) -> str:
    make_run(tmp_path / "runs" / name)
    answer = page.post("/api/servers", {"run": id_of_run(page, name), **more})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def test_a_server_is_started_found_by_another_page_stopped_and_started_again(page: Browser, tmp_path: Path) -> None:
    key = begun(page, tmp_path)
    found = wait(page, key, "running")
    folder = f"state/servers/{key}"
    assert found["command"] == f"stoker serve one=runs/one --port 0 --token-file {folder}/token --keys {folder}/keys"
    assert (tmp_path / folder / "token").stat().st_mode & 0o777 == 0o600
    other = Browser(page.settings).begin()
    assert other.get("/api/servers").json()["servers"][0]["address"] == found["address"]
    assert [each["name"] for each in other.get(f"/api/servers/{key}/models").json()["models"]] == ["one"]
    assert other.post(f"/api/servers/{key}/start").status_code == 409
    assert other.send("DELETE", f"/api/servers/{key}").status_code == 409
    assert other.post(f"/api/servers/{key}/stop").json()["command"].startswith("kill ")
    wait(other, key, "stopped")
    for path in ("models", "traffic"):
        assert other.get(f"/api/servers/{key}/{path}").status_code == 409
    assert other.post(f"/api/servers/{key}/stop").status_code == 409
    assert other.post(f"/api/servers/{key}/start").status_code == 200
    assert wait(other, key, "running")["address"] == found["address"]  # its callers find it where it was
    other.post(f"/api/servers/{key}/stop")
    wait(other, key, "stopped")
    assert other.post(f"/api/servers/{key}/start", {"port": 80}).status_code == 400
    assert "--port 0 " in other.post(f"/api/servers/{key}/start", {"port": 0}).json()["command"]
    wait(other, key, "running")
    other.post(f"/api/servers/{key}/stop")
    wait(other, key, "stopped")
    assert other.send("DELETE", f"/api/servers/{key}").status_code == 200
    assert page.get("/api/servers").json()["servers"] == []


def test_models_are_loaded_unloaded_and_kept_for_the_next_start(
    page: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = begun(page, tmp_path)
    wait(page, key, "running")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")  # which would read the token
    make_run(tmp_path / "runs" / "two")
    asked = {"run": id_of_run(page, "two"), "name": "second"}
    command = page.post(f"/api/servers/{key}/models", asked).json()["command"]
    assert f"$(cat state/servers/{key}/token)" in command and str(tmp_path / "runs/two") in command
    assert page.post(f"/api/servers/{key}/models", asked).status_code == 409
    refused = page.post(f"/api/servers/{key}/models", {**asked, "name": "bad"})
    assert refused.status_code == 400 and refused.json()["error"]["message"] == "it does not fit the base"
    assert page.get(f"/api/servers/{key}").json()["models"] == {"one": "runs/one", "second": "runs/two"}
    assert page.send("DELETE", f"/api/servers/{key}/models/one").status_code == 200
    assert [each["name"] for each in page.get(f"/api/servers/{key}/models").json()["models"]] == ["second"]
    page.post(f"/api/servers/{key}/stop")
    wait(page, key, "stopped")
    assert "second=runs/two" in page.post(f"/api/servers/{key}/start").json()["command"]
    wait(page, key, "running")
    page.send("DELETE", f"/api/servers/{key}/models/second")
    page.post(f"/api/servers/{key}/stop")
    wait(page, key, "stopped")
    assert page.post(f"/api/servers/{key}/start").status_code == 409
    actions = [line["action"] for line in page.page.audit.lines()]
    assert actions.count("load model") == 2 and actions.count("unload model") == 2


def test_a_server_that_fails_says_why(page: Browser, tmp_path: Path) -> None:
    found = wait(page, begun(page, tmp_path, name="fails"), "failed")
    assert found["error"] == "there is no base" and found["address"] == ""


def test_keys_are_made_and_revoked(page: Browser, tmp_path: Path) -> None:
    key = begun(page, tmp_path)
    made = page.post(f"/api/servers/{key}/keys", {"name": "shop"}).json()
    file = tmp_path / "state" / "servers" / key / "keys"
    assert file.read_text() == f"shop ask {hash_of(made['key'])}\n"
    assert made["command"] == f"stoker keys state/servers/{key}/keys --add shop --role ask"
    assert made["key"] not in page.page.audit.path.read_text()
    assert page.get(f"/api/servers/{key}/keys").json()["keys"] == [{"name": "shop", "role": "ask"}]
    for wrong in ({"name": "shop"}, {"name": "../x"}, {"name": "x", "role": "see"}, {}):
        assert page.post(f"/api/servers/{key}/keys", wrong).status_code == 400
    assert page.send("DELETE", f"/api/servers/{key}/keys/other").status_code == 404
    assert page.send("DELETE", f"/api/servers/{key}/keys/shop").status_code == 200
    assert file.read_text() == ""


def test_only_what_the_page_may_use_is_served(page: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "one")
    key = id_of_run(page, "one")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "elsewhere")
    adapter = tmp_path / "runs" / "exports" / "adapter"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tmp_path / "elsewhere")}))
    paths = ("elsewhere", "runs/link", "runs/../elsewhere", "/etc", "~", "runs/none", "runs/exports/adapter")
    for path in paths:
        assert page.post("/api/servers", {"path": path, "name": "x"}).status_code in (400, 403), path
    for name in ("--engine", "a b", "a/b", "", "x" * 101):
        asked = {"run": key, "name": name} if name else {"run": key, "name": "é"}
        assert page.post("/api/servers", asked).status_code == 400, name
    for host in ("--x", "a b", ""):
        assert page.post("/api/servers", {"run": key, "host": host}).status_code == 400
    assert page.post("/api/servers", {"run": key, "port": 80}).status_code == 400
    (run / "job.yaml").write_text(f"task: sft\nmodel: {tmp_path / 'elsewhere'}\ndata: rows.jsonl\n")
    assert page.post("/api/servers", {"run": key}).status_code == 403
    assert page.get("/api/servers").json()["servers"] == []


def test_what_each_role_may(make_page: Callable[..., Browser], tmp_path: Path) -> None:
    runner = make_page(users=True).login("runner")
    key = begun(runner, tmp_path)
    wait(runner, key, "running")
    run = id_of_run(runner, "one")
    assert runner.post("/api/servers", {"run": run, "host": "0.0.0.0"}).status_code == 403
    assert runner.post(f"/api/servers/{key}/keys", {"name": "a", "role": "admin"}).status_code == 403
    assert runner.post(f"/api/servers/{key}/keys", {"name": "a"}).status_code == 200
    viewer = Browser(runner.settings).login("viewer")
    for path in ("", "/models", "/keys"):
        assert viewer.get(f"/api/servers/{key}{path}").status_code == 200
    for method, path in (("POST", "/stop"), ("POST", "/keys"), ("DELETE", "/keys/a"), ("DELETE", "/models/one")):
        assert viewer.send(method, f"/api/servers/{key}{path}", {"name": "b"}).status_code == 403


def kept_server(tmp_path: Path, err: str = "", **more: Any) -> str:
    """The id of a server that failed, as its folder holds it."""
    key = "0" * 16
    record = {"id": key, "models": {"one": "runs/one"}, "host": "127.0.0.1", "port": 0, "command": "", "user": "boss"}
    files = {"server.json": json.dumps({**record, "time": 1.0, **more}), "err": err, "token": "a token", "keys": ""}
    files |= {"begun.json": json.dumps({"time": 1.0}), "ended.json": json.dumps({"code": 2, "time": 2.0})}
    (tmp_path / "state" / "servers" / key).mkdir()
    for name, text in files.items():
        (tmp_path / "state" / "servers" / key / name).write_text(text)
    return key


def test_a_server_that_others_can_reach_is_started_again_by_an_admin(
    make_page: Callable[..., Browser], tmp_path: Path
) -> None:
    make_run(tmp_path / "runs" / "one")
    runner = make_page(users=True).login("runner")
    key = kept_server(tmp_path, host="0.0.0.0")
    assert runner.post(f"/api/servers/{key}/start").status_code == 403
    assert runner.get(f"/api/servers/{key}").json()["status"] == "failed"


def test_a_server_is_started_again_only_with_what_the_page_may_use(page: Browser, tmp_path: Path) -> None:
    make_run(tmp_path / "elsewhere")
    key = kept_server(tmp_path, models={"one": "elsewhere"})
    assert page.post(f"/api/servers/{key}/start").status_code == 403
    assert page.get(f"/api/servers/{key}").json()["status"] == "failed"


def test_a_servers_log_shows_no_password(page: Browser, tmp_path: Path) -> None:
    found = page.get(f"/api/servers/{kept_server(tmp_path, 'error: no s3://me:hush@host/x')}").json()
    assert (found["error"], found["log"]) == ("no s3://me:***@host/x", "error: no s3://me:***@host/x")


def test_a_server_beyond_the_limit_is_refused(page: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_servers, "MOST", 0)
    make_run(tmp_path / "runs" / "one")
    assert page.post("/api/servers", {"run": id_of_run(page, "one")}).status_code == 429
    assert not list((tmp_path / "state" / "servers").iterdir())
    key = kept_server(tmp_path, "error: there is no base")
    assert page.post(f"/api/servers/{key}/start").status_code == 429
    found = page.get(f"/api/servers/{key}").json()
    assert (found["status"], found["log"]) == ("failed", "error: there is no base")


def test_a_server_whose_number_another_process_has_is_not_asked(page: Browser, tmp_path: Path) -> None:
    key = begun(page, tmp_path)
    wait(page, key, "running")
    file = tmp_path / "state" / "servers" / key / "pid.json"
    values = json.loads(file.read_text())
    psutil.Process(values["pid"]).kill()
    wait(page, key, "failed")
    (file.parent / "ended.json").unlink()
    file.write_text(json.dumps({**values, "pid": psutil.Process().pid}))  # of this test, created at another time
    assert wait(page, key, "interrupted")["address"] == ""
    assert page.get(f"/api/servers/{key}/models").status_code == 409


def test_traffic_is_what_the_metrics_count() -> None:
    metrics = Metrics()
    for seconds in (0.02, 0.04, 0.3, 2.0):
        metrics.answers.labels("one", "shop").observe(seconds)
    metrics.answers.labels("one", "").observe(0.02)
    metrics.prompt_tokens.labels("one", "shop").inc(70)
    metrics.answer_tokens.labels("one", "shop").inc(30)
    metrics.requests.labels("/v1/chat/completions", "200").inc(5)
    metrics.requests.labels("/v1/chat/completions", "429").inc(2)
    metrics.requests.labels("/metrics", "200").inc(99)
    metrics.in_flight.set(3)
    found = traffic_of(metrics.text().decode())
    assert (found["requests"], found["refused"], found["in_flight"]) == (7, 2, 3)
    page, shop = found["rows"]
    assert (page["key"], page["answers"], page["prompt_tokens"]) == ("", 1, 0)
    assert (shop["model"], shop["key"], shop["answers"], shop["prompt_tokens"], shop["answer_tokens"]) == (
        "one", "shop", 4, 70, 30,
    )  # fmt: skip
    assert shop["first_token"] == {"p50": None, "p95": None}
    assert 0.025 <= shop["answer_seconds"]["p50"] <= 0.05 and 1 < shop["answer_seconds"]["p95"] <= 2.5


def test_quantiles_are_linear_within_a_bucket() -> None:
    buckets = [(1.0, 0.0), (2.0, 10.0), (4.0, 20.0), (float("inf"), 20.0)]
    assert quantile(0.5, buckets) == 2.0
    assert quantile(0.25, buckets) == 1.5
    assert quantile(0.95, buckets) == pytest.approx(3.8)
    assert quantile(0.95, [(1.0, 0.0), (float("inf"), 5.0)]) == 1.0
    assert quantile(0.5, []) is None and quantile(0.5, [(1.0, 0.0), (float("inf"), 0.0)]) is None
