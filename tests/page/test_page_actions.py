"""Actions, imports, forks and removal: what may be asked for, and what is started."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from browsing import Browser, eventually, make_run
from filelock import FileLock

from stoker.page import actions
from stoker.page.actions import VERBS, Asked
from stoker.page.processes.job_queue import JobQueue
from stoker.page.run_data.run_index import id_of


@pytest.fixture
def with_run(make_page: Callable[..., Browser], tmp_path: Path) -> tuple[Browser, str]:
    """A page with a run whose job names nothing on this machine, and the run's id."""
    folder = make_run(tmp_path / "runs" / "one")
    job = "task: sft\nmodel: llama-3m\ndata: chatterbot-corpus\nsteps: 5\noutput: runs/one\n"
    (folder / "job.yaml").write_text(job)
    page = make_page().begin()
    return page, page.get("/api/runs").json()["runs"][0]["id"]


def ended(page: Browser, key: str) -> dict[str, Any]:
    """The action of an id once it has ended."""

    def found() -> dict[str, Any] | None:
        one: dict[str, Any] = page.get(f"/api/actions/{key}").json()
        return None if one["status"] in ("starting", "running") else one

    return dict(eventually(found, key))


def test_an_action_runs_beside_the_page_and_is_found_again(with_run: tuple[Browser, str], tmp_path: Path) -> None:
    page, run = with_run
    begun = page.post("/api/actions", {"verb": "verify", "run": run, "options": {"steps": 0}}).json()
    assert begun["command"] == "stoker verify state/jobs/verify-1.yaml --steps 0"
    found = ended(page, begun["id"])
    assert (found["status"], found["code"]) == ("failed", 2)
    assert "--steps" in found["output"]
    assert [line["command"] for line in page.page.audit.lines()] == [begun["command"]]
    (end,) = (tmp_path / "state").rglob("ended.json")
    end.write_text(json.dumps({"code": 143}))  # as after SIGTERM
    assert ended(page, begun["id"])["status"] == "stopped"
    assert begun["command"] in page.get("/api/script").text


def starting(tmp_path: Path, out: str, err: str) -> Path:
    """The folder of an evaluation that is starting."""
    folder = tmp_path / "state" / "actions" / ("0" * 16)
    folder.mkdir(parents=True)
    action = {"id": folder.name, "verb": "eval", "run": "", "command": "stoker eval", "user": "", "time": 0.0}
    begun = json.dumps({"time": time.time()})
    for name, text in (("action.json", json.dumps(action)), ("begun.json", begun), ("out", out), ("err", err)):
        (folder / name).write_text(text)
    return folder


def test_the_json_of_a_result_is_no_output_before_its_end(page: Browser, tmp_path: Path) -> None:
    found = page.get(f"/api/actions/{starting(tmp_path, '{', '4 rows').name}").json()
    assert (found["status"], found["output"], found["json"]) == ("starting", "4 rows", None)


def test_an_actions_output_and_result_show_no_password(page: Browser, tmp_path: Path) -> None:
    store = "redis://me:hush@host/0"
    folder = starting(tmp_path, json.dumps({"data": store}), f"reading {store}\n")
    (folder / "ended.json").write_text(json.dumps({"code": 0}))
    found = page.get(f"/api/actions/{folder.name}").json()
    masked = "redis://me:***@host/0"
    assert (found["output"], found["json"]) == (f"reading {masked}\n", {"data": masked})


def test_an_action_beyond_the_limit_is_refused(
    with_run: tuple[Browser, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actions, "AT_ONCE", 1)
    page, run = with_run
    starting(tmp_path, "", "")
    found = page.post("/api/actions", {"verb": "verify", "run": run, "options": {"steps": 0}})
    assert (found.status_code, found.headers["retry-after"]) == (429, "5")
    assert len(page.get("/api/actions").json()["actions"]) == 1 and not list(page.page.audit.lines())


@pytest.mark.parametrize("key", ["trust_remote_code", "allow_pickle"])
@pytest.mark.parametrize("verb", ["eval", "export", "verify", "submit"])
def test_a_runs_own_job_does_not_decide_that_code_may_run(
    with_run: tuple[Browser, str], tmp_path: Path, verb: str, key: str
) -> None:
    page, run = with_run
    job = f"task: sft\nmodel: {{name: llama-3m, {key}: true}}\ndata: chatterbot-corpus\n"
    (tmp_path / "runs" / "one" / "job.yaml").write_text(job)
    found = page.post("/api/actions", {"verb": verb, "run": run})  # of the only user, who is an admin
    assert found.status_code == 403 and f"`{key}` lets code run" in found.text
    assert page.get("/api/actions").json()["actions"] == []


def test_templates_to_compare_are_kept_as_a_file(with_run: tuple[Browser, str], tmp_path: Path) -> None:
    page, run = with_run
    content = b'{"prompt": "a", "completion": "b"}\n'
    key = page.post("/api/uploads", {"name": "rows.jsonl", "size": len(content)}).json()["id"]
    answers = page.send("PATCH", f"/api/uploads/{key}?offset=0", content=content).json()["path"]
    options = {"answers": answers, "prompts": {"plain": "{prompt}", "polite": "Please: {prompt}"}}
    begun = page.post("/api/actions", {"verb": "eval", "run": run, "options": options}).json()
    (kept,) = (tmp_path / "state" / "jobs").glob("prompts-*.json")
    assert f"--prompts {kept.relative_to(tmp_path)}" in begun["command"]
    assert json.loads(kept.read_text()) == options["prompts"]
    page.send("DELETE", f"/api/actions/{begun['id']}")
    for wrong in ({}, {"one": "{prompt}"}, {"a": 1, "b": "x"}, "/etc/passwd", ["a", "b"]):
        found = page.post("/api/actions", {"verb": "eval", "run": run, "options": {**options, "prompts": wrong}})
        assert found.status_code in (400, 403), wrong


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"verb": "train"}, 400),
        ({"verb": "serve"}, 400),
        ({"verb": ""}, 400),
        ({"verb": "eval", "run": "../x"}, 404),
        ({"verb": "eval", "run": "RUN", "options": {"trust_remote_code": True}}, 400),
        ({"verb": "eval", "run": "RUN", "options": {"to": "/tmp/x"}}, 400),
        ({"verb": "eval", "run": "RUN", "options": {"answers": "/etc/passwd"}}, 403),
        ({"verb": "eval", "run": "RUN", "options": {"answers": "runs/../../x.jsonl"}}, 403),
        ({"verb": "eval", "run": "RUN", "options": {"answers": "--json"}}, 400),
        ({"verb": "eval", "run": "RUN", "options": {"data": "/etc/passwd"}}, 403),
        ({"verb": "eval", "run": "RUN", "options": {"data": "file:///etc/passwd"}}, 403),
        ({"verb": "eval", "run": "RUN", "options": {"tasks": ["/etc/passwd"]}}, 400),
        ({"verb": "eval", "run": "RUN", "options": {"tasks": ["--to"]}}, 400),
        ({"verb": "eval", "run": "RUN", "options": {"score": ["json_schema:/etc/passwd"]}}, 400),
        ({"verb": "eval", "run": "RUN", "options": {"at": "--to=/tmp"}}, 400),
        ({"verb": "eval", "run": "RUN", "options": {"limit": True}}, 400),
        ({"verb": "export", "run": "RUN", "options": {"to": "/tmp/x"}}, 400),
        ({"verb": "export", "run": "RUN", "options": {"to": "../x"}}, 400),
        ({"verb": "export", "run": "RUN", "options": {"to": "exported/x"}}, 400),
        ({"verb": "export", "run": "RUN", "options": {"to": ".."}}, 400),
        ({"verb": "export", "run": "RUN", "options": {"format": "../../x"}}, 400),
        ({"verb": "describe", "name": "--on"}, 400),
        ({"verb": "submit", "yaml": "task: sft\nmodel: llama-3m\ndata: /etc/passwd\n"}, 403),
        ({"verb": "eval", "run": "RUN", "options": []}, 400),
    ],
)
def test_what_no_action_may_do_starts_nothing(with_run: tuple[Browser, str], body: dict[str, Any], status: int) -> None:
    page, run = with_run
    found = page.post("/api/actions", {**body, "run": run} if body.get("run") == "RUN" else body)
    assert found.status_code == status, found.text
    assert page.get("/api/actions").json()["actions"] == []
    assert not list(page.page.audit.lines())


@pytest.mark.parametrize(("value", "word"), [(7, "7"), (12345678.0, "12345678"), (0.123456789, "0.123456789")])
def test_numbers_of_an_action_keep_their_digits(page: Browser, value: float, word: str) -> None:
    asked = Asked(page.page, page.page.accounts.all()[0], None)
    assert VERBS["eval"].options["max_tokens"](asked, "max_tokens", value) == ["--max-tokens", word]


def test_targets_that_cannot_be_read_are_one_error(
    page: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert page.get("/api/targets").json()["targets"] == []
    (tmp_path / "stoker").mkdir()
    file = tmp_path / "stoker" / "targets.yaml"
    file.write_text("lab: {ssh: {hosts: [gpu1]}}\nodd: 5\n")
    assert page.get("/api/targets").json()["targets"] == [{"name": "lab", "kind": "ssh"}, {"name": "odd", "kind": ""}]
    file.write_bytes(b"caf\xe9: {}\n")
    found = page.get("/api/targets")
    assert (found.status_code, found.json()["error"]["line"]) == (400, 1)


def test_an_export_is_named_in_any_script(with_run: tuple[Browser, str]) -> None:
    page, run = with_run
    for name in ("客服-问答.v1", "été_1"):
        found = page.post("/api/actions", {"verb": "export", "run": run, "options": {"to": name}})
        assert found.status_code == 200, found.text
        assert ended(page, found.json()["id"])["to"] == f"runs/exports/{name}"
    found = page.post("/api/actions", {"verb": "export", "run": run, "options": {"to": "a b"}})
    error = found.json()["error"]
    assert (error["message"], error["hint"]) == ("`a b` cannot be the name of a folder", "write `a-b`")


@pytest.mark.parametrize("option", ["answers", "data", "prompts"])
@pytest.mark.parametrize(
    "value",
    [
        "~/private.jsonl",
        "file:///etc/passwd",
        "local:///etc/passwd",
        "http://169.254.169.254/latest/x.jsonl",
        "s3://bucket/x.jsonl",
        "simplecache::file:///etc/passwd",
        "/et?/passwd",
        "../x.jsonl",
    ],
)
def test_paths_of_an_action_stay_inside_where_the_page_starts_in_an_allowed_folder(
    make_page: Callable[..., Browser], tmp_path: Path, value: str, option: str
) -> None:
    make_run(tmp_path / "runs" / "one")
    (tmp_path / "runs" / "one" / "job.yaml").write_text("task: sft\nmodel: llama-3m\ndata: chatterbot-corpus\n")
    page = make_page(users=True, data=(tmp_path.resolve(),)).login("runner")
    run = page.get("/api/runs").json()["runs"][0]["id"]
    asked = {"verb": "eval", "run": run, "options": {option: value}}
    assert page.post("/api/actions", asked).status_code == 403
    assert page.get("/api/actions").json()["actions"] == []


def test_scorers_that_run_code_and_submissions_are_for_an_admin(
    make_page: Callable[..., Browser], tmp_path: Path
) -> None:
    make_run(tmp_path / "runs" / "one")
    (tmp_path / "runs" / "one" / "job.yaml").write_text("task: sft\nmodel: llama-3m\ndata: chatterbot-corpus\n")
    page = make_page(users=True).login("runner")
    run = page.get("/api/runs").json()["runs"][0]["id"]
    for score in ("python: os:system", "python:os:system", "judge:http:elsewhere", "code", "code:5"):
        asked = {"verb": "eval", "run": run, "options": {"score": [score]}}
        assert page.post("/api/actions", asked).status_code == 403
    for verb in ("submit", "stop", "resume"):
        assert page.post("/api/actions", {"verb": verb, "run": run, "name": "mine"}).status_code == 403
    code = "task: module\nmodule: {model: os.system}\n"
    assert page.post("/api/jobs", {"yaml": code, "name": "x"}).status_code == 403
    trust = "task: sft\nmodel: {name: llama-3m, trust_remote_code: true}\ndata: chatterbot-corpus\n"
    assert page.post("/api/jobs", {"yaml": trust, "name": "x"}).status_code == 403
    assert not page.page.queue.entries()


@pytest.mark.parametrize(
    "text",
    [
        "task: sft\nmodel: llama-3m\ndata: /etc/passwd\n",
        "task: sft\nmodel: llama-3m\ndata: ../secret.jsonl\n",
        "task: sft\nmodel: llama-3m\ndata: secret.jsonl\n",
        "task: sft\nmodel: llama-3m\ndata: file:///etc/passwd\n",
        "task: sft\nmodel: llama-3m\ndata: simplecache::file:///etc/passwd\n",
        "task: sft\nmodel: llama-3m\ndata: /et?/passwd\n",
        "task: sft\nmodel: llama-3m\ndata: ~/.ssh/*.txt\n",
        "task: sft\nmodel: /etc\ndata: chatterbot-corpus\n",
        "task: sft\nmodel: secrets\ndata: chatterbot-corpus\n",
        "task: sft\nmodel: llama-3m\ndata: {path: chatterbot-corpus, template: secret.jinja}\n",
        "task: sft\nmodel: llama-3m\ndata: chatterbot-corpus\noutput: /tmp/elsewhere\n",
        "task: sft\nmodel: llama-3m\ndata: chatterbot-corpus\noutput: runs/../elsewhere\n",
        "task: sft\nmodel: llama-3m\ndata: chatterbot-corpus\ncheckpoint: {to: /tmp/elsewhere}\n",
        "task: sft\nmodel: llama-3m\ndata: runs/link/x.jsonl\n",
        "a: &a /etc/passwd\ntask: sft\nmodel: llama-3m\ndata: *a\n",
        "stages:\n  - {name: a, task: sft, model: llama-3m, data: /etc/passwd}\n",
    ],
)
def test_a_job_reads_and_writes_nothing_outside_of_the_folders(page: Browser, tmp_path: Path, text: str) -> None:
    (tmp_path / "secret.jsonl").write_text('{"text": "4711"}\n')
    (tmp_path / "secret.jinja").write_text("4711")
    (tmp_path / "secrets").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "x.jsonl").write_text('{"text": "4711"}\n')
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "elsewhere")
    for path in ("/api/jobs", "/api/audit", "/api/rows", "/api/plan"):
        found = page.post(path, {"yaml": text, "name": "x"})
        assert found.status_code == 403, (path, found.text)
        assert found.json()["error"]["line"] > 0
    checked = page.post("/api/check", {"yaml": text}).json()
    assert not checked["ok"] and checked["problems"] and "4711" not in json.dumps(checked)
    assert not page.page.queue.entries()


def test_a_link_in_a_run_is_not_followed(with_run: tuple[Browser, str], tmp_path: Path) -> None:
    page, run = with_run
    for name in ("secret", "rank-0.log", "stack-0.txt"):
        (tmp_path / name).write_text('{"step": 1, "loss": 47114711}\n')
    for name in ("metrics.jsonl", "job.yaml"):
        (tmp_path / "runs" / "one" / name).unlink()
        (tmp_path / "runs" / "one" / name).symlink_to(tmp_path / "secret")
    (tmp_path / "runs" / "one" / "logs").symlink_to(tmp_path)
    for path in ("", "/metrics", "/log?rank=0", "/files", "/stacks", "/events"):
        assert "47114711" not in page.get(f"/api/runs/{run}{path}").text


def test_a_fork_is_a_job_to_edit_and_never_touches_its_parent(with_run: tuple[Browser, str], tmp_path: Path) -> None:
    page, run = with_run
    before = {path: path.read_bytes() for path in (tmp_path / "runs" / "one").iterdir()}
    found = page.post(f"/api/runs/{run}/fork").json()
    assert found["name"] == "one-fork" and "output" not in found["yaml"] and "steps: 5" in found["yaml"]
    assert {path: path.read_bytes() for path in (tmp_path / "runs" / "one").iterdir()} == before


def test_a_fork_that_goes_on_is_a_copy(
    with_run: tuple[Browser, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(JobQueue, "start_starter", lambda _: None)
    page, run = with_run
    found = page.post(f"/api/runs/{run}/fork", {"from": "newest", "name": "two"}).json()
    one, two = tmp_path / "runs" / "one", tmp_path / "runs" / "two"
    assert (two / "metrics.jsonl").read_bytes() == (one / "metrics.jsonl").read_bytes()
    assert found["command"].startswith("cp -r runs/one runs/two && stoker train state/jobs/two-")
    assert page.get(f"/api/runs/{found['id']}").json()["status"] == "queued"
    assert page.post(f"/api/runs/{run}/fork", {"from": "newest", "name": "two"}).status_code == 409
    with FileLock(one / ".lock"):  # it trains
        assert page.post(f"/api/runs/{run}/fork", {"from": "newest", "name": "three"}).status_code == 400
    trust = "task: sft\nmodel: {name: llama-3m, trust_remote_code: true}\ndata: chatterbot-corpus\n"
    (one / "job.yaml").write_text(trust)
    assert page.post(f"/api/runs/{run}/fork", {"from": "newest", "name": "three"}).status_code == 403
    assert not (tmp_path / "runs" / "three").exists()


def test_a_fork_does_not_share_its_parents_store(
    with_run: tuple[Browser, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(JobQueue, "start_starter", lambda _: None)
    page, run = with_run
    job = tmp_path / "runs" / "one" / "job.yaml"
    job.write_text(job.read_text() + "checkpoint: {to: runs/store, every: 5}  # of all runs\n")
    assert page.post(f"/api/runs/{run}/fork", {"from": "newest", "name": "two"}).status_code == 409
    assert not (tmp_path / "runs" / "two").exists() and not page.page.queue.entries()
    found = page.post(f"/api/runs/{run}/fork").json()["yaml"]
    assert "every: 5" in found and "store" not in found and "# of all runs" in found


def test_a_removed_run_comes_back(with_run: tuple[Browser, str], tmp_path: Path) -> None:
    page, run = with_run
    undo = page.post(f"/api/runs/{run}/delete").json()["undo"]
    assert page.get("/api/runs").json()["runs"] == []
    assert page.get(f"/api/runs/{run}").status_code == 404
    assert [each["name"] for each in page.get("/api/removed").json()["runs"]] == ["one"]
    for name in ("..", "x@1", undo.replace("one", "two"), f"..%2f{undo}"):
        assert page.post(f"/api/removed/{name}/restore").status_code in (404, 405)
    assert page.post(f"/api/removed/{undo}/restore").json()["id"] == run
    assert (tmp_path / "runs" / "one" / "metrics.jsonl").is_file()
    assert [each["id"] for each in page.get("/api/runs").json()["runs"]] == [run]


def test_a_removed_run_comes_back_below_its_folder_of_runs_alone(with_run: tuple[Browser, str], tmp_path: Path) -> None:
    page, run = with_run
    undo = page.post(f"/api/runs/{run}/delete").json()["undo"]
    (tmp_path / "runs" / ".removed" / f"{undo}.from").write_text(str(tmp_path / "elsewhere" / "one"))
    assert page.post(f"/api/removed/{undo}/restore").status_code == 403
    assert not (tmp_path / "elsewhere").exists()


def test_a_run_that_trains_and_a_folder_of_runs_are_not_removed(with_run: tuple[Browser, str], tmp_path: Path) -> None:
    page, run = with_run
    with FileLock(tmp_path / "runs" / "one" / ".lock"):
        assert page.post(f"/api/runs/{run}/delete").status_code == 400
    (tmp_path / "runs" / "events.jsonl").write_text('{"event": "started"}\n')
    page.page.runs.forget()
    assert page.post(f"/api/runs/{id_of(tmp_path.resolve() / 'runs')}/delete").status_code == 409
    assert (tmp_path / "runs" / "one" / "metrics.jsonl").is_file()


def test_a_job_of_a_removed_run_is_not_listed(with_run: tuple[Browser, str], tmp_path: Path) -> None:
    page, run = with_run
    queue, folder = page.page.queue, tmp_path / "runs" / "one"
    queue.start_starter = lambda: None  # type: ignore[method-assign]
    common: dict[str, Any] = {"cwd": tmp_path, "run": folder, "job": folder / "job.yaml", "command": "", "user": "me"}

    def ended(code: int) -> None:
        queue.add(["true"], name="one", **common)
        _, process = queue.entries()[-1]
        (process.folder / "ended.json").write_text(json.dumps({"code": code}))

    ended(0)
    ended(1)
    assert [each["id"] for each in page.get("/api/runs").json()["runs"]] == [run]
    undo = page.post(f"/api/runs/{run}/delete").json()["undo"]
    assert page.get("/api/runs").json()["runs"] == []
    assert page.get(f"/api/runs/{run}").status_code == 404
    ended(2)  # a later job in the same folder, which failed before it made a run
    assert [each["status"] for each in page.get("/api/runs").json()["runs"]] == ["failed"]
    assert page.post(f"/api/removed/{undo}/restore").json()["id"] == run


def test_a_job_with_stages_of_which_one_was_removed_is_not_listed(
    with_run: tuple[Browser, str], tmp_path: Path
) -> None:
    page, _ = with_run
    page.page.queue.start_starter = lambda: None  # type: ignore[method-assign]
    root = tmp_path / "runs" / "chain"
    root.mkdir()
    (tmp_path / "runs" / "one").rename(root / "sft")
    record = [{"name": "sft", "run": "runs/chain/sft", "task": "sft", "needs": []}]
    (root / "stages.json").write_text(json.dumps(record))
    page.page.runs.forget()
    job = root / "sft" / "job.yaml"
    page.page.queue.add(["true"], cwd=tmp_path, run=root, job=job, command="", user="me", name="chain")
    (page.page.queue.entries()[-1][1].folder / "ended.json").write_text(json.dumps({"code": 1}))
    folders = {run["folder"]: run for run in page.get("/api/runs").json()["runs"]}
    stage = folders.pop(str(root / "sft"))
    assert folders.keys() == {str(root)}
    assert page.post(f"/api/runs/{stage['id']}/delete").status_code == 200
    assert page.get("/api/runs").json()["runs"] == []


def test_jobs_of_another_pages_folders_are_not_listed(make_page: Callable[..., Browser], tmp_path: Path) -> None:
    page = make_page().begin()
    page.page.queue.start_starter = lambda: None  # type: ignore[method-assign]
    other, job = tmp_path / "elsewhere" / "runs" / "one", tmp_path / "job.yaml"
    page.page.queue.add(["true"], cwd=tmp_path, run=other, job=job, command="", user="me", name="one")
    assert page.get("/api/runs").json()["runs"] == []
    assert page.get(f"/api/runs/{id_of(other)}").status_code == 404


def test_other_tools_files_become_a_job(page: Browser) -> None:
    axolotl = "base_model: llama-3m\ndatasets:\n  - {path: rows.jsonl, type: alpaca}\nnum_epochs: 2\nadapter: lora\n"
    found = page.post("/api/import", {"files": [{"name": "axolotl.yaml", "text": axolotl}]}).json()
    assert "epochs: 2" in found["yaml"] and found["command"] == "stoker import axolotl.yaml"
    wrong = page.post("/api/import", {"files": [{"name": "x.yaml", "text": "- 1\n"}]})
    assert wrong.status_code == 400
    for name in ("axolotl (1).yaml", "my axolotl.yaml"):
        renamed = page.post("/api/import", {"files": [{"name": name, "text": axolotl}]})
        assert "epochs: 2" in renamed.json()["yaml"], renamed.text
    both = [{"name": "a b.yaml", "text": axolotl}, {"name": "x/a b.yaml", "text": axolotl}]
    assert page.post("/api/import", {"files": both}).json()["error"]["message"] == "two files are named `a b.yaml`"
    assert page.post("/api/import", {"files": [{"name": "..", "text": axolotl}]}).status_code == 400
    for name in ("长" * 100 + ".yaml", "x" * 230 + ".yaml"):
        renamed = page.post("/api/import", {"files": [{"name": name, "text": axolotl}]}).json()
        jobs = [each["yaml"].partition("\nversion: ")[2] for each in (renamed, found)]  # the comment has the name
        assert jobs[0] == jobs[1] != ""


@pytest.mark.parametrize("text", ["task: sft\nmodel: m\ndata: d  # ours\n", "model: m\nstages:\n  - {name: a}\n"])
def test_a_job_file_becomes_the_job_as_it_is(page: Browser, text: str) -> None:
    for name in ("ours.yaml", "x" * 230 + ".yaml"):
        found = page.post("/api/import", {"files": [{"name": name, "text": text}]})
        assert found.json() == {"yaml": text, "own": True, "command": f"stoker check {name}"}


def test_a_forked_job_shows_its_secrets_to_admins_alone(
    make_page: Callable[..., Browser], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(JobQueue, "start_starter", lambda _: None)
    run = make_run(tmp_path / "runs" / "one")
    secret = "task: sft\nmodel: llama-3m\ndata: redis://:secret4711@store:6379/0\nsteps: 5\n"
    (run / "job.yaml").write_text(secret)
    runner, boss = (make_page(users=True, urls=("redis://store:6379/0",)).login(name) for name in ("runner", "boss"))
    path = f"/api/runs/{id_of(run)}/fork"
    assert runner.post(f"/api/runs/{id_of(run)}/resume").status_code == 200  # whoever resumes a run is not its author
    masked = runner.post(path).json()["yaml"]
    assert "secret4711" not in masked and "redis://:***@store" in masked
    assert boss.post(path).json()["yaml"] == secret
    (tmp_path / "failed.yaml").write_text(secret)
    failed = tmp_path / "runs" / "failed"
    boss.page.queue.add(
        ["x"], cwd=tmp_path, run=failed, job=tmp_path / "failed.yaml", command="", user="runner", name="failed"
    )
    unbegun = f"/api/runs/{id_of(failed)}/fork"  # it has no run
    assert (boss.post(unbegun).json()["yaml"], runner.post(unbegun).json()["yaml"]) == (secret, masked)
    assert boss.post(unbegun, {"from": "newest"}).status_code == 404
    messages = [each["message"] for each in runner.post("/api/check", {"yaml": masked}).json()["problems"]]
    assert any("`***` in place of a secret" in message for message in messages), messages


def test_forks_take_free_names(with_run: tuple[Browser, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JobQueue, "start_starter", lambda _: None)
    page, run = with_run
    for name in ("one-fork", "one-fork-2"):
        assert page.post(f"/api/runs/{run}/fork", {"from": "newest"}).status_code == 200
        assert (tmp_path / "runs" / name / "metrics.jsonl").is_file()


@pytest.mark.parametrize("key", ["deepspeed", "new_special_tokens_config"])
@pytest.mark.parametrize("name", ["/etc/passwd", "../../secret.json", "secret.json", "~/x", "ESCAPED", "with space"])
@pytest.mark.often("../../secret.json", "ESCAPED", then="slow")
def test_an_imported_file_leads_to_no_other_file(page: Browser, tmp_path: Path, name: str, key: str) -> None:
    for file in ("secret.json", "with space"):
        (tmp_path / file).write_text('{"secret_4711": "of the machine", "zero_optimization": {"stage": 3}}')
    name = name.replace("ESCAPED", str(tmp_path / "secret.json").replace("/", "\\x2f"))
    text = f'model_name_or_path: llama-3m\nstage: sft\ndo_train: true\n{key}: "{name}"\n'
    found = page.post("/api/import", {"files": [{"name": "l.yaml", "text": text}]})
    assert found.status_code == 200 and found.json()["yaml"]
    assert "4711" not in found.text and "zero" not in found.text and "root:" not in found.text


def test_imported_files_lead_to_each_other(page: Browser, tmp_path: Path) -> None:
    register = {"mine": {"file_name": "rows.jsonl"}}
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps({"mine": {"file_name": "4711.jsonl"}}))
    text = "model_name_or_path: llama-3m\nstage: sft\ndo_train: true\ndataset: mine\ndeepspeed: d.json\n"
    files = [{"name": "l.yaml", "text": text}, {"name": "d.json", "text": '{"zero_optimization": {"stage": 3}}'}]
    found = page.post("/api/import", {"files": files})
    assert found.status_code == 400 and "drop the `dataset_info.json`" in found.text
    found = page.post("/api/import", {"files": [*files, {"name": "dataset_info.json", "text": json.dumps(register)}]})
    assert found.status_code == 200, found.text
    assert "zero3" in found.json()["yaml"] and "rows.jsonl" in found.json()["yaml"] and "4711" not in found.text
