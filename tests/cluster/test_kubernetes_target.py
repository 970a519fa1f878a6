"""Runs on a cluster of the tests' own, by the official client: submit, gangs, logs, reasons, eviction, retries, stop.

The pods run small commands here: lines of `setup`, which come before `stoker node`.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from api_server import ApiServer
from kubernetes_runs import IMAGE
from kubernetes_submissions import JOB, Submit, until
from ruamel.yaml import YAML

from stoker.cli.main import main
from stoker.cluster.kubernetes.run_pods import pods_of
from stoker.cluster.submitted_run import target_of


def test_a_run_from_submission_to_its_logs(prepared: Submit, cluster: ApiServer) -> None:
    script = 'ls rows.jsonl; stat -c %a /dev/shm/stoker-channel; echo "rank ${POD_NAME##*-} | here"; echo $POD_IP'
    target, submission = prepared('echo "rank 0 | $(cat rows.jsonl)"; ' + script)
    record = target.submit(submission)
    assert (record.name, record.nodes, record.devices) == ("tiny", 2, 2)
    until("done", target, record)
    lines = list(target.logs(record, rank=None, follow=False))
    assert sum(line.endswith("| rows.jsonl") for line in lines) == 2
    assert sum(line.endswith("| 600") for line in lines) == 2
    assert {line.rpartition(" ")[2] for line in lines if "127.0.1" in line} == {"127.0.1.1", "127.0.1.2"}
    assert next(iter(target.logs(record, rank=0, follow=False))).startswith('{"prompt": "What is blue?"')
    (found,) = target.records()
    assert found.name == "tiny" and found.fingerprint == record.fingerprint and found.handle == record.handle
    text = "\n".join(target.describe(record))
    assert "Job tiny in the namespace default: done" in text and "Succeeded, alpha, exit code 0" in text
    secret = cluster.one("secrets", "tiny-channel")
    assert secret is not None and len(secret["stringData"]["channel"]) == 64
    job = cluster.one("jobs", "tiny")
    assert job is not None
    cluster.remove(job, "jobs")  # as its ttl does
    assert not any(cluster.all(plural) for plural in ("configmaps", "secrets", "services"))
    assert target.status(record).state == "lost"


@pytest.mark.slow
def test_code_is_sent_where_it_is_wanted(prepared: Submit, cluster: ApiServer) -> None:
    target, submission = prepared("python3 -c 'import stoker; print(stoker.__file__)'", code=True)
    record = target.submit(submission)
    until("done", target, record)
    files = [line.partition(" | ")[2] for line in target.logs(record, rank=None, follow=False)]
    assert len(files) == 2 and all("/volumes/work/.code/stoker/__init__.py" in file for file in files)


@pytest.mark.slow
def test_what_one_config_map_cannot_hold_is_sent_in_several(
    prepared: Submit, cluster: ApiServer, tmp_path: Path
) -> None:
    (tmp_path / "large.bin").write_bytes(os.urandom(2_100_000))
    digest = hashlib.sha256((tmp_path / "large.bin").read_bytes()).hexdigest()
    target, submission = prepared("sha256sum large.bin", send=["large.bin"])
    record = target.submit(submission)
    assert len(cluster.all("configmaps")) == 4
    for _ in range(2):
        until("done", target, record)
        lines = list(target.logs(record, rank=None, follow=False))
        assert sum(f"{digest}  large.bin" in line for line in lines) == 2
        record = target.resume(record)  # it has ended, so it is made again from what the cluster keeps


@pytest.mark.parametrize("gang", ["coscheduling", "native"])
def test_a_gang_starts_whole_or_not_at_all(prepared: Submit, cluster: ApiServer, gang: str) -> None:
    first, submission = prepared("sleep 60", name="first", gang=gang)
    first_record = first.submit(submission)
    until("running", first, first_record)
    second, submission = prepared("true", name="second", gang=gang)
    second_record = second.submit(submission)
    why = until("waiting", second, second_record)
    time.sleep(0.3)
    why = second.status(second_record).why
    assert "none of 2 nodes will do: 2 have too little nvidia.com/gpu free" in why
    assert "pod group second: 0 of 2 pods could be placed" in why
    assert all("nodeName" not in p["spec"] for p in cluster.all("pods") if p["metadata"]["name"].startswith("second"))
    first.stop(first_record)
    until("stopped", first, first_record)
    until("done", second, second_record)


def test_kueue_admits_stops_and_starts_again(prepared: Submit, cluster: ApiServer) -> None:
    first, submission = prepared("sleep 60", name="first", gang="kueue", queue="research")
    first_record = first.submit(submission)
    until("running", first, first_record)
    second, submission = prepared("sleep 60", name="second", gang="kueue", queue="research")
    second_record = second.submit(submission)
    assert "the queue has not admitted it" in until("waiting", second, second_record)
    first.stop(first_record)
    until("stopped", first, first_record)
    until("running", second, second_record)
    assert first.resume(first_record) == first_record
    until("waiting", first, first_record)
    second.stop(second_record)
    until("running", first, first_record)


def test_stop_saves_and_resume_goes_on(prepared: Submit, cluster: ApiServer) -> None:
    script = "trap 'echo saved >> /work/saved; exit 143' TERM; touch /work/started$POD_IP; "
    script += "while [ ! -e /work/go ]; do sleep 0.1; done"
    target, submission = prepared(script)
    record = target.submit(submission)
    claim = cluster.folder / "claims" / "runs"
    while len(list(claim.glob("started*"))) < 2:
        time.sleep(0.05)
    target.stop(record)
    until("stopped", target, record)
    while cluster.all("pods"):
        time.sleep(0.05)
    assert (claim / "saved").read_text() == "saved\nsaved\n"
    (claim / "go").touch()
    assert target.resume(record) == record
    until("done", target, record)


def test_an_evicted_pod_comes_back_and_is_not_counted(prepared: Submit, cluster: ApiServer) -> None:
    target, submission = prepared("while [ ! -e /work/go ]; do sleep 0.05; done", retries=0)
    record = target.submit(submission)
    until("running", target, record)
    while len(running(cluster)) < 2:
        time.sleep(0.05)
    victim = running(cluster)[0]
    cluster.controllers.evict(victim["metadata"]["name"])
    while len(running(cluster)) < 2 or victim["metadata"]["uid"] in [p["metadata"]["uid"] for p in cluster.all("pods")]:
        time.sleep(0.05)
    (cluster.folder / "claims" / "runs" / "go").touch()
    until("done", target, record)


def running(cluster: ApiServer) -> list[dict[str, Any]]:
    """The pods that run."""
    return [pod for pod in cluster.all("pods") if pod["status"].get("phase") == "Running"]


@pytest.mark.slow
def test_a_failed_pod_is_started_again_as_often_as_was_said(prepared: Submit, cluster: ApiServer) -> None:
    script = 'n=/work/$(echo "$POD_IP"); echo x >> $n; [ $(wc -l < $n) -gt 2 ] || exit 1'
    target, submission = prepared(script, name="two", retries=2)
    record = target.submit(submission)
    until("done", target, record)
    target, submission = prepared("exit 1", name="one", retries=1)
    record = target.submit(submission)
    assert "MaxFailedIndexesExceeded" in until("failed", target, record)
    starts = [sum(p["metadata"]["name"].startswith(f"one-{node}-") for p in cluster.all("pods")) for node in (0, 1)]
    assert max(starts) == 2


def test_wrong_input_is_not_tried_again(prepared: Submit, cluster: ApiServer) -> None:
    target, submission = prepared("echo 'error: no such file'; exit 2")
    record = target.submit(submission)
    why = until("failed", target, record)
    assert "exit code 2" in why
    assert all(p["metadata"]["name"].count("-") == 2 for p in cluster.all("pods")) and len(cluster.all("pods")) <= 2
    lines = list(target.logs(record, rank=None, follow=True))
    assert any(line.endswith("error: no such file") for line in lines)
    again = target.resume(record)  # what has failed is created anew
    assert "exit code 2" in until("failed", target, again)


def test_logs_are_followed_to_the_end_over_a_restart(prepared: Submit, cluster: ApiServer) -> None:
    script = "n=/work/$POD_IP; echo x >> $n; t=$(wc -l < $n); for s in 1 2 3; do sleep 0.1; "
    script += 'echo "rank ${POD_IP##*.} | start $t step $s"; done; [ $t = 2 ] || exit 1'
    target, submission = prepared(script)
    record = target.submit(submission)
    lines = list(target.logs(record, rank=1, follow=True))
    assert lines == [f"start {start} step {step}" for start in (1, 2) for step in (1, 2, 3)]


def test_a_jobset_runs_its_job(prepared: Submit, cluster: ApiServer) -> None:
    target, submission = prepared("sleep 0.2; hostname >/dev/null", kind="jobset")
    record = target.submit(submission)
    until("done", target, record)
    assert record.handle["kind"] == "JobSet" and cluster.one("jobs", "tiny-node-0") is not None
    args = cluster.all("pods")[0]["spec"]["containers"][0]["args"][0]
    assert "tiny-node-0-0.tiny:" in args and "tiny-node-0-1.tiny:" in args


def test_reasons_of_a_pod_that_cannot_start(prepared: Submit, cluster: ApiServer) -> None:
    target, submission = prepared("true", image="registry.example.org/absent:2", name="image")
    record = target.submit(submission)
    time.sleep(0.5)
    why = until("waiting", target, record)
    assert "the image registry.example.org/absent:2 cannot be pulled: failed to pull image" in why
    assert "there is no volume claim runs" in why
    target.stop(record)
    target, submission = prepared("true", secrets={"HF_TOKEN": "hub/token"}, name="secret")
    record = target.submit(submission)
    time.sleep(0.5)
    assert 'CreateContainerConfigError: secret "hub" not found' in until("waiting", target, record)


@pytest.mark.slow
def test_the_verbs_of_the_command_line(
    cluster: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("STATE", "CONFIG"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "What is blue?", "completion": "The sea."}\n')
    block = {
        "image": IMAGE,
        "kubeconfig": str(cluster.kubeconfig),
        "nodes": 2,
        "setup": ["echo 'rank 1 | hello'; exit 0"],
    }
    block["volumes"] = [{"claim": "runs", "at": "/work"}]
    with (tmp_path / "cluster.yaml").open("w") as file:
        YAML().dump({"kubernetes": block}, file)
    (tmp_path / "job.yaml").write_text(JOB)

    def said(*words: str, code: int = 0) -> str:
        assert main(words) == code
        return capsys.readouterr().out

    documents = list(
        YAML(typ="safe", pure=True).load_all(said("submit", "job.yaml", "--on", "cluster.yaml", "--dry-run"))
    )
    assert [d["kind"] for d in documents] == ["ConfigMap", "Secret", "Service", "Job"] and not cluster.objects
    alone = ("target={kubernetes: {image: x, nodes: 2}}",)
    assert "\nkind: Job\n" in said("submit", "job.yaml", *alone, "--dry-run")  # what lacks is said beside it
    said("submit", "job.yaml", *alone, code=2)
    assert "Job tiny in the namespace default" in said("submit", "job.yaml", "--on", "cluster.yaml")
    end = time.monotonic() + 30
    while "Job tiny in the namespace default: done" not in (found := said("describe", "tiny")):
        assert time.monotonic() < end, found
        time.sleep(0.1)
    assert set(said("logs", "tiny", "-f", "--rank", "1").splitlines()) == {"hello"}
    assert "tiny" in said("runs", "--on", "cluster.yaml")
    said("submit", "job.yaml", "--on", "cluster.yaml")  # the earlier run has ended
    said("stop", "tiny")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
    assert "Job tiny" in said("describe", "tiny", "--on", "cluster.yaml")


def test_a_run_is_found_after_another_context_became_current(prepared: Submit, cluster: ApiServer) -> None:
    target, submission = prepared("sleep 60")
    record = target.submit(submission)
    config = json.loads(cluster.kubeconfig.read_text())
    context = {**config["contexts"][0]["context"], "namespace": "elsewhere"}
    config["contexts"].append({"name": "other", "context": context})
    cluster.kubeconfig.write_text(json.dumps({**config, "current-context": "other"}))
    (found,) = target.records()
    for known in (record, found):
        target_of(known).stop(known)
    assert until("stopped", target, record) == "" and target_of(record).status(record).state == "stopped"


def test_pods_that_only_reserve_a_place_are_not_those_of_the_run() -> None:
    class Api:
        def select(self, version: str, kind: str, *, labels: str) -> list[dict[str, Any]]:
            index = {"batch.kubernetes.io/job-completion-index": "0"}
            reserved = {"yunikorn.apache.org/placeholder": "true"}
            return [
                {"metadata": {"name": "tiny-0", "labels": index, "annotations": {"a": "b"}}},
                {"metadata": {"name": "tg-node-0", "labels": {}, "annotations": reserved}},
            ]

    api: Any = Api()
    assert [pod["metadata"]["name"] for pod in pods_of(api, "tiny")] == ["tiny-0"]
