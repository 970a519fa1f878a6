"""Jobs: checking, starting, the queue; what is started is what the command says."""

from __future__ import annotations

import asyncio
import json
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from browsing import PATIENCE, Browser, eventually, make_run
from filelock import FileLock

from stoker.cli.main import main
from stoker.errors import DiskFailed
from stoker.page.access.audit_log import AuditLog
from stoker.page.jobs import job_check
from stoker.page.jobs.job_check import devices_wanted
from stoker.page.page_error import PageError
from stoker.page.processes import job_queue, run_verb, stop_requests
from stoker.page.processes.detached_process import DetachedProcess, write_process
from stoker.page.processes.job_queue import JobQueue, visible_gpus
from stoker.page.processes.run_verb import VerbResult, Verbs
from stoker.page.routes.job_routes import kept_job
from stoker.page.run_data.run_index import id_of
from stoker.runs.lock_holder import holder_of
from stoker.runs.run_folder import RunFolder

JOB = "task: sft\nmodel: llama-3m\ndata: chatterbot-corpus\nsteps: 1\n"


@pytest.fixture
def unstarted(page: Browser, monkeypatch: pytest.MonkeyPatch) -> Browser:
    """A page whose queue nobody works off."""
    monkeypatch.setattr(JobQueue, "start_starter", lambda _: None)
    return page


def test_errors_of_a_job_have_their_places(page: Browser) -> None:
    found = page.post("/api/check", {"yaml": "task: sft\nmodel: llama-3m\ndata: chatterbot-corpus\ntrain: {lrr: 1}\n"})
    (problem,) = found.json()["problems"]
    assert (problem["line"], problem["column"], problem["key"]) == (4, 9, "train.lrr")
    assert problem["hint"] == "write `lr`" and str(page.settings.state) not in found.text
    for text in ("task: [", "", "- 1", "5", "task: sft\ntask: sft\n"):
        checked = page.post("/api/check", {"yaml": text}).json()
        assert checked["problems"] and not checked["ok"], text


def test_a_job_is_resolved_with_reasons(page: Browser) -> None:
    found = page.post("/api/check", {"yaml": JOB}).json()
    assert found["ok"] and found["resolved"]["steps"] == {
        "value": 1,
        "source": "file",
        "where": "job.yaml:4:8",
        "why": "",
    }
    assert found["resolved"]["train.optimizer"]["value"] == "adamw" and found["resolved"]["train.optimizer"]["why"]


def refused(*_: Any, **__: Any) -> None:
    raise DiskFailed("the disk is full")


def test_a_job_waits_under_its_name_and_can_be_taken_out(unstarted: Browser, tmp_path: Path) -> None:
    begun = unstarted.post("/api/jobs", {"yaml": JOB, "name": "My run!"}).json()
    assert begun["command"] == "stoker train state/jobs/My-run-1.yaml output=runs/My-run"
    assert (tmp_path / "state" / "jobs" / "My-run-1.yaml").read_text() == JOB
    ((entry, process),) = unstarted.page.queue.entries()
    values = json.loads((process.folder / "process.json").read_text())
    assert values["arguments"] == [sys.executable, "-m", "stoker", *begun["command"].split()[1:]]
    assert (values["cwd"], entry.user) == (str(tmp_path), "local")
    (run,) = unstarted.get("/api/runs").json()["runs"]
    assert (run["id"], run["status"]) == (begun["id"], "queued")
    assert unstarted.get(f"/api/runs/{begun['id']}").json()["job"] == JOB
    assert unstarted.post("/api/jobs", {"yaml": JOB, "name": "My run"}).status_code == 409
    assert [path.name for path in (tmp_path / "state" / "jobs").iterdir()] == ["My-run-1.yaml"]
    with pytest.MonkeyPatch.context() as patch:  # nothing is done that the audit log does not have
        patch.setattr(AuditLog, "write", refused)
        assert "the disk is full" in unstarted.send("DELETE", f"/api/queue/{begun['number']}").text
    assert len(unstarted.page.queue.entries()) == 1
    assert unstarted.send("DELETE", f"/api/queue/{begun['number']}").status_code == 200
    assert unstarted.send("DELETE", f"/api/queue/{begun['number']}").status_code == 409
    assert unstarted.get("/api/queue").json()["jobs"] == []
    assert [line["action"] for line in unstarted.page.audit.lines()] == ["train", "cancel"]


def test_a_job_that_waits_says_after_what(unstarted: Browser) -> None:
    ids = [unstarted.post("/api/jobs", {"yaml": JOB, "name": name}).json()["id"] for name in ("one", "two", "three")]
    for _, process in unstarted.page.queue.entries()[:1]:
        (process.folder / "begun.json").write_text(json.dumps({"time": time.time()}))
    places = [unstarted.get(f"/api/runs/{key}").json()["queue"] for key in ids[1:]]
    assert places == [{"place": 1, "after": ["one"]}, {"place": 2, "after": ["one", "two"]}]
    assert "queue" not in unstarted.get(f"/api/runs/{ids[0]}").json()


def test_a_job_that_failed_before_its_run_is_removed(unstarted: Browser, tmp_path: Path) -> None:
    for name in ("one", "two"):
        unstarted.post("/api/jobs", {"yaml": JOB, "name": name})
    for _, process in unstarted.page.queue.entries():
        (process.folder / "ended.json").write_text(json.dumps({"code": 2}))
    make_run(tmp_path / "runs" / "two")
    unstarted.page.runs.forget()
    one = id_of(tmp_path / "runs" / "one")
    assert unstarted.post(f"/api/runs/{one}/resume").status_code == 200
    (unstarted.page.queue.entries()[-1][1].folder / "ended.json").write_text(json.dumps({"code": 2}))
    jobs = unstarted.get("/api/queue").json()["jobs"][1:]
    assert [unstarted.send("DELETE", f"/api/queue/{job['number']}").status_code for job in jobs] == [409, 200]
    assert [run["name"] for run in unstarted.get("/api/runs").json()["runs"]] == ["two"]


def test_a_job_that_has_no_run_shows_no_password(unstarted: Browser) -> None:
    key = unstarted.post("/api/jobs", {"yaml": JOB, "name": "one"}).json()["id"]
    ((entry, process),) = unstarted.page.queue.entries()
    Path(entry.job).write_text(f"{JOB}# redis://me:hush@host/0\n")
    (process.folder / "err").write_text("error: no redis://me:hush@host/0\n")
    (process.folder / "ended.json").write_text(json.dumps({"code": 2}))
    found = unstarted.get(f"/api/runs/{key}").json()
    assert found["status"] == "failed"
    assert found["job"].endswith("# redis://me:***@host/0\n") and found["error"] == "error: no redis://me:***@host/0\n"
    assert "hush" not in unstarted.get("/api/runs").text


def test_a_job_that_waits_is_stopped_by_its_run(unstarted: Browser, tmp_path: Path) -> None:
    begun = unstarted.post("/api/jobs", {"yaml": JOB, "name": "one"}).json()
    found = unstarted.post(f"/api/runs/{begun['id']}/stop")
    assert (found.status_code, found.json()) == (200, {"command": "stoker stop runs/one", "gone": True})
    assert not unstarted.page.queue.entries() and unstarted.get("/api/runs").json()["runs"] == []
    assert unstarted.post(f"/api/runs/{begun['id']}/stop").status_code == 404
    make_run(tmp_path / "runs" / "two")
    unstarted.page.runs.forget()
    two = id_of(tmp_path / "runs" / "two")
    assert unstarted.post(f"/api/runs/{two}/resume").status_code == 200
    assert unstarted.post(f"/api/runs/{two}/stop").json()["gone"] is False
    assert not unstarted.page.queue.entries()
    assert unstarted.post(f"/api/runs/{two}/stop").status_code == 409


def test_a_job_that_is_starting_is_stopped(unstarted: Browser, tmp_path: Path) -> None:
    words = [sys.executable, "-c", "import time; time.sleep(600)"]
    queue, run = unstarted.page.queue, tmp_path / "runs" / "one"
    queue.add(words, cwd=tmp_path, run=run, job=tmp_path / "x", command="", user="local", name="one")
    ((_, process),) = queue.entries()
    process.start()
    assert unstarted.post(f"/api/runs/{id_of(run)}/stop").status_code == 200
    eventually(lambda: process.state == "ended")
    assert process.code == -signal.SIGTERM


@pytest.fixture
def heard(tmp_path: Path) -> Iterator[Path]:
    """A file with an x for each request to stop that the process of the job ``all``, with its stage ``one``, took."""
    stage, path = make_run(tmp_path / "runs" / "all" / "one"), tmp_path / "heard"
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom filelock import FileLock\n"
        "from stoker.resilience import stop_signals\nstop_signals.SAME = 2.0\n"
        "heard = Path(sys.argv[2])\n"
        "with FileLock(sys.argv[1]), stop_signals.handled_by(lambda *_: heard.write_text(heard.read_text() + 'x')):\n"
        "    heard.write_text('')\n    time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(stage / ".lock"), str(path)]) as process:
        try:
            eventually(path.is_file)
            yield path
        finally:
            process.kill()


def test_the_log_of_a_command_is_its_output_and_its_errors(unstarted: Browser, tmp_path: Path) -> None:
    key = unstarted.post("/api/jobs", {"yaml": JOB, "name": "one"}).json()["id"]
    folder = unstarted.page.queue.entries()[0][1].folder
    (folder / "out").write_text("step 1\n")
    (folder / "err").write_text("a warning\n")
    found = unstarted.get(f"/api/runs/{key}/log").json()
    assert (found["text"], found["errors"]) == ("step 1\n", "a warning\n")
    output = subprocess.run(shlex.split(found["command"]), cwd=tmp_path, capture_output=True, text=True, check=True)
    assert output.stdout == "step 1\na warning\n"


def test_a_second_stop_is_refused_unless_it_is_meant(
    unstarted: Browser, tmp_path: Path, heard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop_requests, "SAME", 2.0)
    job, page = tmp_path / "runs" / "all", unstarted
    queue = page.page.queue
    queued = queue.add(["x"], cwd=tmp_path, run=job, job=tmp_path / "x", command="", user="local", name="all")
    own = holder_of(RunFolder(job / "one"))
    assert own is not None
    place = tmp_path / "state" / "queue" / f"{queued.number:06d}"
    (place / "begun.json").write_text(json.dumps({"time": time.time()}))
    write_process(place / "pid.json", own)
    record = [{"name": "one", "task": "sft", "needs": [], "run": "runs/all/one"}]
    (job / "stages.json").write_text(json.dumps(record))
    page.page.runs.forget()
    paths = [f"/api/runs/{id_of(folder)}" for folder in (job, job / "one")]
    assert [page.get(path).json()["stopping"] for path in paths] == [False, False]
    assert page.post(f"{paths[0]}/stop").status_code == 200
    eventually(lambda: heard.read_text() == "x")
    again = Browser(page.settings).begin()  # the page was restarted
    assert [again.get(path).json()["stopping"] for path in paths] == [True, True]
    for path in paths:
        refused = again.post(f"{path}/stop")
        assert (refused.status_code, refused.json()["error"]["message"]) == (409, "all is stopping")
    assert heard.read_text() == "x"
    assert again.post(f"{paths[1]}/stop", {"now": True}).status_code == 200
    eventually(lambda: heard.read_text() == "xx")
    own.kill()
    eventually(lambda: holder_of(RunFolder(job / "one")) is None)
    assert again.get(paths[1]).json()["stopping"] is False


def test_a_run_is_resumed_once(unstarted: Browser, tmp_path: Path) -> None:
    key = id_of(make_run(tmp_path / "runs" / "one"))
    unstarted.page.runs.forget()
    barrier = threading.Barrier(4)
    found: list[int] = []

    def resume() -> None:
        barrier.wait()
        found.append(unstarted.post(f"/api/runs/{key}/resume").status_code)

    with FileLock(tmp_path / "runs" / "one" / ".lock"):  # it trains in a terminal
        assert unstarted.post(f"/api/runs/{key}/resume").status_code == 409
    threads = [threading.Thread(target=resume) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [200, 409, 409, 409] and len(unstarted.page.queue.entries()) == 1


def test_files_of_jobs_are_not_shared(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda number: kept_job(tmp_path, "submit", str(number)), range(40)))
    assert [path.read_text() for path in paths] == [str(number) for number in range(40)]
    assert len(set(paths)) == 40


def test_who_may_run_does_not_resume_code_of_an_admin(
    make_page: Callable[..., Browser], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(JobQueue, "start_starter", lambda _: None)
    page = make_page(users=True).login("boss")
    code = "task: sft\nmodel: {name: llama-3m, trust_remote_code: true}\ndata: chatterbot-corpus\n"
    run, job = make_run(tmp_path / "runs" / "one"), tmp_path / "state" / "jobs" / "one-1.yaml"
    job.write_text(code)
    command = "stoker train state/jobs/one-1.yaml output=runs/one"
    page.page.queue.add(["true"], cwd=tmp_path, run=run, job=job, command=command, user="boss", name="one")
    ((_, process),) = page.page.queue.entries()
    (process.folder / "ended.json").write_text('{"code": 0}')
    assert page.login("runner").post(f"/api/runs/{id_of(run)}/resume").status_code == 403
    assert page.login("boss").post(f"/api/runs/{id_of(run)}/resume").status_code == 200


def test_a_job_is_resumed_in_the_folder_where_it_began(
    make_page: Callable[..., Browser], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(JobQueue, "start_starter", lambda _: None)
    page = make_page().begin()
    earlier, run = tmp_path / "earlier", make_run(tmp_path / "runs" / "one")
    page.page.runs.forget()
    job = tmp_path / "state" / "jobs" / "one-1.yaml"
    job.write_text(JOB)
    command = "stoker train ../state/jobs/one-1.yaml output=../runs/one"
    common: dict[str, Any] = {"run": run, "job": job, "command": command, "user": "local", "name": "one"}
    page.page.queue.add(["true"], cwd=earlier, devices=3, **common)
    ((_, process),) = page.page.queue.entries()
    (process.folder / "ended.json").write_text('{"code": 1}')
    found = page.post(f"/api/runs/{id_of(run)}/resume").json()
    assert found["command"] == f"(cd {earlier} && {command})"
    (_, (entry, process)) = page.page.queue.entries()
    assert (process.cwd, entry.command, entry.devices) == (earlier, command, 3)
    (process.folder / "ended.json").write_text('{"code": 1}')
    job.write_text(JOB.replace("chatterbot-corpus", "state/../rows.jsonl"))
    assert page.post(f"/api/runs/{id_of(run)}/resume").status_code == 403
    (tmp_path / "rows.jsonl").write_text("")
    (earlier / "runs").mkdir(parents=True)
    (earlier / "runs" / "rows.jsonl").write_text("")
    job.write_text(JOB.replace("chatterbot-corpus", "runs/rows.jsonl"))  # not in the folder `runs` of the page
    assert page.post(f"/api/runs/{id_of(run)}/resume").status_code == 403


def test_forks_and_runs_of_the_command_line_take_the_devices_of_their_job(
    unstarted: Browser, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def checked(_page: Any, text: str, _account: Any, **_options: Any) -> tuple[list[Any], dict[str, Any]]:
        assert text == JOB
        return [], {"job": {"parallel": {"data": 2, "tensor": 1, "pipeline": 1, "context": 1}}, "plan": ""}

    monkeypatch.setattr(job_check, "visible_gpus", lambda: ["0", "1", "2", "3"])
    monkeypatch.setattr(job_check, "check_job_text", checked)
    run = make_run(tmp_path / "runs" / "one")
    (run / "job.yaml").write_text(JOB)
    (run / "environment.json").write_text(json.dumps({"command": ["stoker", "train", "one.yaml"]}))
    unstarted.page.runs.forget()
    copy = unstarted.post(f"/api/runs/{id_of(run)}/fork", {"from": "newest", "name": "two"}).json()
    shown = [unstarted.get(f"/api/runs/{key}").json()["command"] for key in (id_of(run), copy["id"])]
    assert shown == ["stoker train one.yaml", "stoker train state/jobs/two-1.yaml output=runs/two"]
    assert unstarted.post(f"/api/runs/{id_of(run)}/resume").status_code == 200
    assert [entry.devices for entry, _ in unstarted.page.queue.entries()] == [2, 2]


@pytest.mark.parametrize(
    "name", ["../../elsewhere", "..", "/", "...", "a/../../b", "\\..\\x", "$(touch ran)", "x" * 190, "名" * 100]
)
def test_a_name_is_a_folder_of_runs_and_nothing_else(unstarted: Browser, tmp_path: Path, name: str) -> None:
    found = unstarted.post("/api/jobs", {"yaml": JOB, "name": name})
    if found.status_code == 200:
        ((entry, _),) = unstarted.page.queue.entries()
        assert Path(entry.run).parent == tmp_path / "runs" and Path(entry.job).parent == tmp_path / "state" / "jobs"
    else:
        assert found.status_code == 400


def test_a_wrong_job_is_not_started(unstarted: Browser) -> None:
    found = unstarted.post("/api/jobs", {"yaml": JOB.replace("steps: 1", "steps: -1"), "name": "x"})
    assert (found.status_code, found.json()["error"]["line"]) == (400, 4)
    assert not unstarted.page.queue.entries()


def test_a_run_is_not_started_over(unstarted: Browser, tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "one")
    assert unstarted.post("/api/jobs", {"yaml": JOB, "name": "one"}).status_code == 409
    assert unstarted.post("/api/jobs", {"yaml": JOB + "output: runs/one\n"}).status_code == 409


def test_jobs_start_in_their_order_one_at_a_time(tmp_path: Path) -> None:
    for name in ("queue", "runs"):
        (tmp_path / name).mkdir()
    queue = JobQueue(tmp_path)
    queue.start_starter = lambda: None  # type: ignore[method-assign]
    common: dict[str, Any] = {"cwd": tmp_path, "job": tmp_path, "command": "", "user": "me"}
    for name in ("first", "second", "third"):
        words = [sys.executable, "-c", f"open('order', 'a').write('<{name}'); open('order', 'a').write('{name}>')"]
        queue.add(words, run=tmp_path / "runs" / name, name=name, **common)
    assert queue.cancel(2)
    queue.run_starter()
    assert (tmp_path / "order").read_text() == "<firstfirst><thirdthird>"
    assert [(entry.name, process.state, process.code) for entry, process in queue.entries()] == [
        ("first", "ended", 0),
        ("third", "ended", 0),
    ]
    assert not queue.cancel(1)


def test_jobs_share_the_gpus_and_none_overtakes(tmp_path: Path) -> None:
    for name in ("queue", "runs"):
        (tmp_path / name).mkdir()
    queue = JobQueue(tmp_path)
    queue.start_starter = lambda: None  # type: ignore[method-assign]
    write = "import os, time; open('began', 'a').write('%s:' + os.environ['CUDA_VISIBLE_DEVICES'] + ' ')"
    wait = "; [time.sleep(0.01) for _ in range(30_000) if not os.path.exists('go')]"
    common: dict[str, Any] = {"cwd": tmp_path, "job": tmp_path, "command": "", "user": "me"}
    for name, devices in (("one", 1), ("two", 2), ("all", 0), ("last", 1)):
        words = [sys.executable, "-c", write % name + (wait if name in ("one", "two") else "")]
        queue.add(words, run=tmp_path / "runs" / name, name=name, devices=devices, **common)
    starter = threading.Thread(target=queue.run_starter, args=(["0", "1", "2", "3"],))
    starter.start()
    began = tmp_path / "began"
    eventually(lambda: began.is_file() and len(began.read_text().split()) == 2)
    time.sleep(0.6)  # `last` would have a GPU, and waits for `all`
    assert sorted(began.read_text().split()) == ["one:0", "two:1,2"]
    (tmp_path / "go").touch()
    starter.join(PATIENCE)
    assert began.read_text().split()[2:] == ["all:0,1,2,3", "last:0"]


@pytest.mark.parametrize(
    ("parallel", "plan", "wanted"),
    [
        ({"data": 2, "tensor": 2, "pipeline": 1, "context": 1}, "", 4),
        ({"data": 1, "tensor": 1, "pipeline": 1, "context": 1}, "", 1),
        ({"data": 2, "tensor": 1, "pipeline": 1, "context": 1}, "the planner's", 0),
        ({}, "", 0),
    ],
)
def test_a_job_asks_for_a_gpu_a_process(parallel: dict[str, int], plan: str, wanted: int) -> None:
    one = {"job": {"parallel": parallel}, "plan": plan}
    assert devices_wanted(one) == wanted
    assert devices_wanted({"stages": [one, {"job": {"parallel": dict.fromkeys(parallel, 1)}}]}) == wanted


@pytest.mark.parametrize(
    ("listed", "given", "found"),
    [
        ("GPU 0: H100\nGPU 1: H100\n  MIG 1g: 0\n", None, ["0", "1"]),
        ("GPU 0: H100\nGPU 1: H100\n", "", []),
        ("GPU 0: H100\nGPU 1: H100\n", "3, 5", ["3", "5"]),
        ("GPU 0: H100\n", "0,1", ["0"]),
        (None, "0", []),
    ],
)
def test_jobs_share_the_gpus_that_the_page_may_see(
    monkeypatch: pytest.MonkeyPatch, listed: str | None, given: str | None, found: list[str]
) -> None:
    monkeypatch.setattr(job_queue, "program_output", lambda *_, **__: listed)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert visible_gpus() == found


def test_a_verb_ends_with_its_children_when_nobody_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = "import pathlib, subprocess; child = subprocess.Popen(['sleep', '600']); path = pathlib.Path('child')"
    words = [sys.executable, "-c", f"{child}; path.write_text(f'{{child.pid}}.'); child.wait()"]
    monkeypatch.setattr(run_verb, "command_of", lambda _: words)
    number = tmp_path / "child"

    async def leave() -> None:
        asked = asyncio.create_task(Verbs(tmp_path).run(["check"], seconds=PATIENCE))
        while not (number.is_file() and number.read_text().endswith(".")):
            await asyncio.sleep(0.01)
        asked.cancel()
        await asyncio.wait([asked])

    asyncio.run(leave())
    process = psutil.Process(int(number.read_text()[:-1])) if psutil.pid_exists(int(number.read_text()[:-1])) else None
    until = time.monotonic() + 10
    while process is not None and process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > until:
            process.kill()
            pytest.fail("the child runs on")
        time.sleep(0.01)


def test_verbs_that_would_wait_too_long_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_verb, "command_of", lambda _: [sys.executable, "-c", "print('a note\\n{}')"])
    monkeypatch.setattr(run_verb, "WAITING", 1)

    async def ask() -> list[Any]:
        verbs = Verbs(tmp_path)
        found = await asyncio.gather(
            *(verbs.run(["check"], seconds=PATIENCE) for _ in range(2)), return_exceptions=True
        )
        return [*found, await verbs.run(["check"], seconds=PATIENCE)]

    first, second, third = asyncio.run(ask())
    assert first == third == VerbResult(0, {}, "")
    assert isinstance(second, PageError) and (second.status, second.retry_after) == (429, 5)


def test_a_process_whose_end_is_being_written_is_not_lost(tmp_path: Path) -> None:
    process, me = DetachedProcess(tmp_path), psutil.Process()
    here, gone = {"pid": me.pid, "created": me.create_time()}, {"pid": me.pid, "created": 0.0}
    (tmp_path / "begun.json").write_text(json.dumps({"time": 0.0}))
    (tmp_path / "watcher.json").write_text(json.dumps(here))
    assert process.state == "starting"  # however long ago it was begun
    (tmp_path / "pid.json").write_text(json.dumps(gone))
    assert process.state == "running" and process.process is None
    (tmp_path / "watcher.json").write_text(json.dumps(gone))
    assert process.state == "lost"
    (tmp_path / "ended.json").write_text(json.dumps({"code": 0}))
    assert process.state == "ended"


def test_a_process_is_not_mistaken_for_another_of_its_number(tmp_path: Path) -> None:
    process = DetachedProcess(tmp_path / "one")
    process.prepare([sys.executable, "-c", ""], cwd=tmp_path)
    (tmp_path / "one" / "begun.json").write_text('{"time": 1}')
    (tmp_path / "one" / "pid.json").write_text('{"pid": 1, "created": 5}')
    assert (process.state, process.stop()) == ("lost", False)


def test_a_command_that_cannot_be_started_says_so(tmp_path: Path) -> None:
    (tmp_path / "queue").mkdir()
    queue = JobQueue(tmp_path)
    queue.start_starter = lambda: None  # type: ignore[method-assign]
    queue.add(["/no/such/program"], cwd=tmp_path, run=tmp_path, job=tmp_path, command="", user="me", name="x")
    queue.run_starter()
    ((_, process),) = queue.entries()
    assert process.code == 127 and "cannot be started" in process.output("err", offset=0)[0]


def test_the_run_of_another_user_is_not_stopped(page: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(process: psutil.Process) -> None:
        raise psutil.AccessDenied(process.pid)

    run = make_run(tmp_path / "runs" / "one")
    page.page.runs.forget()
    monkeypatch.setattr(psutil.Process, "terminate", refuse)
    with FileLock(run / ".lock"):
        found = page.post(f"/api/runs/{id_of(run)}/stop")
    assert found.status_code == 409 and "another user of this machine trains one" in found.text


def test_stopping_a_run_that_has_ended_says_so(
    page: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "runs" / "one")
    page.page.runs.forget()
    run = page.get("/api/runs").json()["runs"][0]["id"]
    assert page.post(f"/api/runs/{run}/stop").status_code == 409
    monkeypatch.chdir(tmp_path)
    assert main(["stop", "one"]) == 0
    assert capsys.readouterr().out == "one is already done\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--host", "0.0.0.0"], "a token is needed"),
        (["--port", "70000"], "--port"),
        (["--token", "short"], "at least 16"),
        (["--token", "open"], "can be read by others"),
        (["--token", "short", "--users", "users"], "not both"),
        (["--users", "users"], "three"),
        (["--users", "none"], "cannot be read"),
        (["--data", "none"], "there is no folder"),
        (["--runs", "users"], "is not a folder"),
        (["--tls-key", "users"], "go together"),
        (["--state", "users/below"], "cannot be kept"),
    ],
)
def test_wrong_options_are_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    (tmp_path / "short").write_text("short\n")
    (tmp_path / "short").chmod(0o600)
    (tmp_path / "open").write_text("a token that is long enough\n")
    (tmp_path / "open").chmod(0o644)
    (tmp_path / "users").write_text("me\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    assert main(["ui", "--port", "0", *words]) == 2
    assert said in capsys.readouterr().err
