"""What Kubernetes cannot run is refused with its reason, and nothing is left in the cluster."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from api_server import ApiServer
from kubernetes_submissions import JOB, Submit

from stoker.cluster.kubernetes.cluster_api import kubeconfig_path
from stoker.cluster.kubernetes.sent_archive import TooLarge, archive_of
from stoker.cluster.sent_files import SentFile
from stoker.errors import UserError
from stoker.job.load_job import load_job


def test_refusals_leave_nothing_behind(prepared: Submit, cluster: ApiServer) -> None:
    target, submission = prepared("true", kind="trainjob")
    cluster.absent = frozenset({"trainer.kubeflow.org"})
    with pytest.raises(
        UserError, match=r"no TrainingRuntime of trainer.kubeflow.org/v1alpha1; it comes with the Kubeflow"
    ):
        target.submit(submission)
    assert not cluster.all("configmaps")
    target, submission = prepared("true")
    cluster.forbidden.add(("POST", "jobs"))
    with pytest.raises(UserError, match=r"this user may not: jobs is forbidden"):
        target.submit(submission)
    assert not cluster.all("configmaps") and not cluster.all("secrets")
    cluster.forbidden.clear()
    target.submit(submission)
    with pytest.raises(UserError, match="exists already"):
        target.submit(submission)
    target, submission = prepared("true", namespace="elsewhere")
    with pytest.raises(UserError, match="there is no namespace elsewhere"):
        target.submit(submission)


def test_what_is_wrong_is_said_before_anything_is_sent(prepared: Submit, cluster: ApiServer, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tiny.yaml:\d+:\d+: the run's folder /work/runs/tiny is on no volume"):
        prepared("true", volumes=[])
    away = f"{JOB}checkpoint: {{to: 's3://bucket/run'}}\n"
    prepared("true", volumes=[], text=away)
    policy = f"{away.replace('sft', 'grpo')}grpo: {{rewards: exact}}\n"
    with pytest.raises(UserError, match=r"the run's folder /work/runs/tiny is on no volume"):
        prepared("true", volumes=[], text=policy)  # its answers are there
    target, first = prepared("true", volumes=[], text=away)
    (tmp_path / "policy.yaml").write_text(policy)
    with pytest.raises(UserError, match=r"the run's folder /work/runs/tiny is on no volume"):
        target.check(replace(first, stage_jobs=(first.loaded, load_job(tmp_path / "policy.yaml"))))
    with pytest.raises(UserError, match=r"tiny.yaml:\d+:\d+: a Volcano Job is scheduled by Volcano"):
        prepared("true", kind="volcano", gang="native")
    (tmp_path / "large.bin").write_bytes(os.urandom(8_100_000))
    with pytest.raises(UserError, match=r"8 config maps hold, 8000000; put large.bin"):
        prepared("true", send=["large.bin"])
    volumes = [{"claim": "runs", "at": "/work"}, {"claim": "old", "at": "/work/runs", "read_only": True}]
    with pytest.raises(UserError, match=r"writes to /work/runs/tiny, and the volume at /work/runs is read-only"):
        prepared("true", volumes=volumes)
    os.environ["HF_TOKEN"] = "hf_1"
    try:
        with pytest.raises(UserError, match=r"the value of HF_TOKEN could be read in the manifest"):
            prepared("true", forward=["HF_*"])
    finally:
        del os.environ["HF_TOKEN"]
    target, submission = prepared("true", kubeconfig="no/such")
    with pytest.raises(UserError, match=r"tiny.yaml:\d+:\d+: there is no kubeconfig no/such; name the file"):
        target.submit(submission)
    target, submission = prepared("true", context="tset")
    with pytest.raises(UserError, match=r"tiny.yaml:\d+:\d+: the kubeconfig has no context tset; did you mean test"):
        target.submit(submission)
    assert not cluster.objects


def test_no_client_and_no_kubeconfig(prepared: Submit, cluster: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    target, submission = prepared("true")
    for text in ("clusters: [", "[]", ""):
        cluster.kubeconfig.write_text(text)
        with pytest.raises(UserError, match=r"tiny.yaml:\d+:\d+: .*/kubeconfig is not a usable kubeconfig"):
            target.submit(submission)
    monkeypatch.setitem(sys.modules, "kubernetes.dynamic", None)
    with pytest.raises(UserError, match=r"pip install 'stoker\[kubernetes\]'"):
        target.submit(submission)
    assert target.preview(submission).startswith("apiVersion: v1\nkind: ConfigMap\n")


def test_a_cluster_that_does_not_answer(prepared: Submit, cluster: ApiServer) -> None:
    target, submission = prepared("true")
    cluster.__exit__(None, None, None)
    with pytest.raises(UserError, match="does not answer"):
        target.submit(submission)


def test_files_that_are_too_large_are_not_read_to_their_end(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(os.urandom(2**24))
    with pytest.raises(TooLarge):
        archive_of([SentFile("a", "", 2**24, file), SentFile("b", "", 1, tmp_path / "absent")])


def test_a_kubeconfig_is_kept_with_its_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KUBECONFIG", "own.yaml")
    assert kubeconfig_path("cluster.yaml") == str(tmp_path / "cluster.yaml")
    assert kubeconfig_path(None) == str(tmp_path / "own.yaml")
    monkeypatch.setenv("KUBECONFIG", os.pathsep.join(("own.yaml", "", "/etc/other.yaml")))
    assert kubeconfig_path(None) == os.pathsep.join((str(tmp_path / "own.yaml"), "/etc/other.yaml"))
    monkeypatch.delenv("KUBECONFIG")
    assert kubeconfig_path(None) is None
