"""The tests' cluster, and jobs prepared for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_server import ApiServer
from kubernetes_runs import IMAGE
from kubernetes_submissions import JOB, NODES, Submit
from ruamel.yaml import YAML

from stoker.cluster.chosen_target import ChosenTarget, choose_target
from stoker.cluster.kubernetes.kubernetes_target import KubernetesTarget
from stoker.cluster.submission import Submission, submission_of
from stoker.job.load_job import load_job


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    """A cluster of two nodes, which is asked often."""
    monkeypatch.setattr("stoker.cluster.kubernetes.run_pods.POLL", 0.2)
    folder = tmp_path / "cluster"
    folder.mkdir()
    with ApiServer(folder, NODES, {IMAGE}, absent=frozenset({"ray.io"})) as server:
        yield server


@pytest.fixture
def prepared(cluster: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Submit:
    """The target and the submission of a job whose pods run a script."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "What is blue?", "completion": "The sea."}\n')

    def make(script: str, *, name: str = "tiny", text: str = JOB, **keys: Any) -> tuple[KubernetesTarget, Submission]:
        block = {"image": IMAGE, "kubeconfig": str(cluster.kubeconfig), "nodes": 2, "setup": [script, "exit 0"]}
        block |= {"volumes": [{"claim": "runs", "at": "/work"}], **keys}
        job = tmp_path / f"{name}.yaml"
        with job.open("w") as file:
            file.write(text)
            YAML().dump({"target": {"kubernetes": block}}, file)
        loaded = load_job(job)
        chosen: ChosenTarget = choose_target(loaded, None)
        target = KubernetesTarget(chosen)
        submission = submission_of(loaded, chosen, tmp_path, name=name)
        target.check(submission)
        return target, submission

    return make
