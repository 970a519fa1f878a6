"""What is written for Ray, without Ray."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from submitting import write_job

from stoker.cluster.chosen_target import choose_target
from stoker.cluster.log_files import LogFile
from stoker.cluster.ray import dashboard, ray_target
from stoker.cluster.ray.ray_target import RayTarget, open_target
from stoker.cluster.ray.shown_logs import NodeLines, ShownLogs
from stoker.cluster.ray.supervisor_actor import SupervisorActor
from stoker.cluster.submission import Submission, submission_of
from stoker.errors import UserError
from stoker.job import load_job


def target_in(folder: Path, *, checkpoint: dict[str, Any] | None = None, **keys: Any) -> tuple[RayTarget, Submission]:
    loaded = load_job(write_job(folder, target={"ray": keys}, checkpoint=checkpoint or {}))
    chosen = choose_target(loaded, None)
    return open_target(chosen), submission_of(loaded, chosen, folder)


@pytest.mark.parametrize("variable", [{"HF_TOKEN": "hf_x"}, {"PROXY": "http://me:pw@host:3128"}])
def test_a_secret_that_the_dashboard_would_show_is_refused(tmp_path: Path, variable: dict[str, str]) -> None:
    target, submission = target_in(tmp_path, environment=variable)
    for step in (target.check, target.preview):
        with pytest.raises(UserError, match=r"job.yaml:1:\d+: the value of \w+ could be read on Ray's dashboard"):
            step(submission)


def test_forwarded_secrets_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"HF_TOKEN": "hf_x", "WANDB_API_KEY": "x", "HF_HOME": "/hf", "HF_TOKEN_PATH": "/t"}.items():
        monkeypatch.setenv(name, value)
    target, submission = target_in(tmp_path, forward=["HF_HOME", "HF_TOKEN*", "WANDB_*"], environment={"PAUSE": "1"})
    sent = target._runtime("folder", 30.0)["env_vars"]
    assert sent == {"HF_HOME": "/hf", "HF_TOKEN_PATH": "/t", "PAUSE": "1", "RAY_JOB_STOP_WAIT_TIME_S": "90"}
    assert "HF_TOKEN and WANDB_API_KEY; set it before `ray start`" in capsys.readouterr().err
    assert "HF_TOKEN=" not in target.preview(submission)


@pytest.mark.parametrize(
    ("to", "written"),
    [
        ("kept", ["checkpoint.to=FOLDER/kept"]),
        ("/kept", ["checkpoint.to=/kept"]),
        ("s3://b/c", ["checkpoint.to=s3://b/c"]),
    ],
)
def test_checkpoints_are_in_the_folder_of_runs(tmp_path: Path, to: str, written: list[str]) -> None:
    target, submission = target_in(tmp_path, checkpoint={"to": to})
    words = json.loads(target._plan(submission, gpus=0))["words"]
    assert [word for word in words if word.startswith("checkpoint.")] == written


@pytest.mark.parametrize(
    ("gpus", "cluster", "shown"),
    [
        ("auto", [{"CPU": 8.0, "GPU": 4.0}], 1),
        ("auto", [{"CPU": 8.0}], 0),
        ("auto", None, "auto"),
        (True, None, 1),
        (False, None, 0),
    ],
)
def test_a_preview_shows_the_gpus_that_would_be_requested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: Any, cluster: list[dict[str, float]] | None, shown: Any
) -> None:
    def get(url: str, **_: Any) -> SimpleNamespace:
        assert url == "http://head:8265/api/v0/nodes"
        if cluster is None:
            raise requests.ConnectionError
        rows = [{"resources_total": node, "state": "ALIVE"} for node in cluster]
        return SimpleNamespace(json=lambda: {"data": {"result": {"result": rows}}})

    monkeypatch.setattr("requests.get", get)
    target, submission = target_in(tmp_path, gpus=gpus, address="http://head:8265")
    plan = target.preview(submission).partition("driver.json:\n")[2].partition("\n# variables:")[0]
    assert json.loads(plan.replace("#", ""))["placement"]["gpus"] == shown


def test_lines_of_one_rank_are_those_of_all_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, _ = target_in(tmp_path)
    lines = ["stoker | placed on a", "rank 1 | a", "sft rank 1 | b", "my-sft_2 rank 0 | c", "rank 10 | d"]
    monkeypatch.setattr(target, "_log_lines", lambda record, whole: lines)
    record: Any = None
    assert list(target.logs(record, rank=1, follow=False)) == ["a", "b"]
    assert list(target.logs(record, rank=None, follow=False)) == lines


def test_an_address_without_its_scheme_is_the_dashboards_where_that_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
    made: list[str] = []

    def client(address: str) -> None:
        made.append(address)
        raise ray.exceptions.RpcError("no store here")

    monkeypatch.setattr("ray.job_submission.JobSubmissionClient", client)
    answer = SimpleNamespace(ok=True)
    monkeypatch.setattr("requests.get", lambda url, **_: asked.append(url) or answer)
    asked: list[str] = []
    for written, ok in (("head:8265", True), ("head:6379", False), ("auto", True), ("http://head:8265", True)):
        answer.ok = ok
        target, _ = target_in(tmp_path, address=written)
        with pytest.raises(UserError, match="no store here"):
            target._client()
    assert made == ["http://head:8265", "head:6379", "auto", "http://head:8265"]
    assert asked == ["http://head:8265/api/version", "http://head:6379/api/version"]


def test_the_files_of_a_run_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, submission = target_in(tmp_path)
    record = submission.record("ray", target={}, on=None, handle={"job": "job-1"})
    monkeypatch.setattr(target, "_info", lambda record: None)
    monkeypatch.setattr(target, "_log_lines", lambda record: [])
    folder = target._block.folder
    for output, shown in (("runs/a", f"{folder}/job/runs/a"), ("/disk/a", "/disk/a"), ("s3://b/a", "s3://b/a")):
        assert f"files        {shown}" in list(target.describe(replace(record, output=output)))


def test_a_run_whose_files_the_cluster_has_dropped_is_not_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, submission = target_in(tmp_path)
    record = submission.record("ray", target={}, on=None, handle={"sent": "gcs://_ray_pkg_1.zip", "deadline": 30.0})
    asked, answer, started = [], SimpleNamespace(status_code=404), []
    monkeypatch.setattr("requests.get", lambda url, **_: asked.append(url) or answer)
    client = SimpleNamespace(get_address=lambda: "http://head:8265", list_jobs=list)
    monkeypatch.setattr(target, "_client", lambda: client)
    monkeypatch.setattr(target, "_start", lambda *arguments: started.append(arguments))
    with pytest.raises(UserError, match="Ray no longer has what job needs"):
        target.resume(record)
    assert asked == ["http://head:8265/api/packages/gcs/_ray_pkg_1.zip"] and not started
    answer.status_code = 200
    assert target.resume(record).handle["job"].startswith("job-") and started


def test_logs_go_on_where_a_node_that_is_lost_has_read_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes see the same files; one is lost, comes back without a memory, and answers late."""
    log = tmp_path / "run" / "logs" / "rank-0.log"
    log.parent.mkdir(parents=True)
    actors = [SupervisorActor(str(tmp_path)) for _ in range(2)]
    shown = ShownLogs()

    def look(*nodes: SupervisorActor) -> list[str]:
        return list(shown.take([node.lines("FOLDER/run", shown.read) for node in nodes]))

    log.write_text("a\n")
    assert look(*actors) == ["rank 0 | a"]
    with log.open("a") as file:
        file.write("b\nhalf")
    assert look(actors[1]) == ["rank 0 | b"]  # the first is lost
    with log.open("a") as file:
        file.write(" c\n")
    assert look(SupervisorActor(str(tmp_path)), actors[1]) == ["rank 0 | half c"]
    late = actors[0].lines("FOLDER/run", {})  # lines that came too late are not taken, and asked for again
    assert [line for _, line in late.lines] == ["rank 0 | a", "rank 0 | b", "rank 0 | half c"]
    assert look(*actors) == []


def test_a_node_that_sees_an_earlier_size_of_a_file_shows_nothing_of_it_again() -> None:
    key, shown = ("rank-0.log", "7"), ShownLogs()

    def answer(offset: int, *lines: str) -> NodeLines:
        return NodeLines([(key, line) for line in lines], {key: LogFile("rank 0", offset)})

    assert list(shown.take([answer(4, "a", "b")])) == ["a", "b"]
    assert list(shown.take([answer(2, "a"), answer(6, "c")])) == ["c"]
    assert list(shown.take([answer(2, "a"), answer(6)])) == [] and shown.read[key].offset == 6


def test_ray_accepts_one_of_two_commands_that_submit_a_run_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: dict[str, SimpleNamespace] = {}
    shown: list[list[str]] = []

    def list_jobs() -> list[SimpleNamespace]:
        return [jobs[number] for number in (shown.pop() if shown else jobs)]

    def submit_job(*, submission_id: str, metadata: dict[str, str], runtime_env: Any, **_: Any) -> None:
        if submission_id in jobs:
            raise RuntimeError(f"Job with submission_id {submission_id} already exists. Please use another")
        jobs[submission_id] = SimpleNamespace(status="PENDING", metadata=metadata, runtime_env=runtime_env)

    client = SimpleNamespace(list_jobs=list_jobs, submit_job=submit_job, get_job_info=jobs.get, get_address=lambda: "")
    target, submission = target_in(tmp_path, gpus=False, code=False)
    monkeypatch.setattr(target, "_client", lambda: client)
    monkeypatch.setattr(ray_target, "nodes_at", lambda *_: None)
    monkeypatch.setattr(ray_target, "has_package", lambda *_: True)
    record = target.submit(submission)
    assert [*jobs] == ["job-1"] == [record.handle["job"]]
    with pytest.raises(UserError, match="job is already waiting as job job-1; wait for it, `stoker stop job`"):
        target.submit(submission)
    shown.append([])  # as the other command, which asked before the job was there
    with pytest.raises(UserError, match=r"another command is submitting or resuming job \(as job job-1\); wait for it"):
        target.submit(submission)
    jobs["job-1"].status = "STOPPED"
    assert target.resume(record).handle["job"] == "job-2"
    with pytest.raises(UserError, match="job is already waiting as job job-2; no action is needed"):
        target.resume(record)


def test_nodes_are_asked_with_ray_s_token_and_gpus_are_not_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get(url: str, *, headers: dict[str, str], **_: Any) -> SimpleNamespace:
        assert url == "http://head:8265/api/v0/nodes"
        rows = [{"resources_total": {"CPU": 8.0, "GPU": 4.0}, "state": "ALIVE"}]
        found = {"data": {"result": {"result": rows}}}
        return SimpleNamespace(json=lambda: found if headers == {"authorization": "Bearer t"} else {})

    monkeypatch.setattr("requests.get", get)
    client = SimpleNamespace(get_address=lambda: "http://head:8265")
    target, submission = target_in(tmp_path, address="http://head:8265")
    monkeypatch.setattr(target, "_client", lambda: client)
    monkeypatch.setattr(dashboard, "_authentication", dict)
    with pytest.raises(UserError, match="does not say which nodes it has, so `gpus: auto` cannot be decided; write"):
        target.check(submission)
    monkeypatch.setattr(dashboard, "_authentication", lambda: {"authorization": "Bearer t"})
    assert target._known_nodes(client) == [{"CPU": 8.0, "GPU": 4.0}]
    target.check(submission)
