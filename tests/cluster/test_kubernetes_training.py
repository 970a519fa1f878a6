"""Training in pods of the tests' cluster: the losses and weights of one machine, also over evictions and stops."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from api_server import ApiServer
from kubernetes_runs import IMAGE
from lab import Lab, losses
from ruamel.yaml import YAML

from made_module import made_module
from stoker.checkpoint.dcp_store import Store
from stoker.cluster.chosen_target import choose_target
from stoker.cluster.kubernetes.kubernetes_target import KubernetesTarget
from stoker.cluster.record import Record
from stoker.cluster.submission import submission_of
from stoker.job.load_job import load_job
from stoker.runs.run_folder import RunFolder

# Pods are real processes that import torch and train.
pytestmark = [pytest.mark.pool, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 40
INDEX = "batch.kubernetes.io/job-completion-index"
JOB: dict[str, Any] = {
    "task": "module",
    "module": {"model": "made:network", "loss": "torch.nn.functional:mse_loss", "data": "made:data"},
    "steps": STEPS,
    "output": "runs/tiny",
    "train": {"batch": 12, "precision": "fp64"},
    "parallel": {"data": 2},
    "checkpoint": {"every": 10, "best": False, "memory": 1},
    "faults": {"back_off": 0.2},
}
MADE = made_module()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], RunFolder]:
    """The same job on this machine, by number of processes."""
    runs: dict[int, RunFolder] = {}

    def of(world: int) -> RunFolder:
        if world not in runs:
            base = tmp_path_factory.mktemp(f"whole-{world}")
            (base / "made.py").write_text(MADE)
            write(base / "job.yaml", {**JOB, "parallel": {"data": world}})
            own = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{base}:{os.environ.get('PYTHONPATH', '')}"}
            done = subprocess.run(
                [sys.executable, "-m", "stoker", "train", "job.yaml"],
                cwd=base,
                env=own,
                capture_output=True,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            runs[world] = RunFolder(base / "runs" / "tiny")
        return runs[world]

    return of


def write(path: Path, values: dict[str, Any]) -> None:
    with path.open("w") as file:
        YAML().dump(values, file)


class Submitted:
    """The job in two pods of a cluster, with one process in each."""

    def __init__(
        self, base: Path, cluster: ApiServer, *, pause: float, job: dict[str, Any] | None = None, **keys: Any
    ) -> None:
        (base / "made.py").write_text(MADE)
        block = {"image": IMAGE, "kubeconfig": str(cluster.kubeconfig), "nodes": 2, "gpu": "none", **keys}
        block |= {"environment": {"PAUSE": f"{pause}"}, "volumes": [{"claim": "runs", "at": "/work"}]}
        write(base / "job.yaml", {**(job or JOB), "target": {"kubernetes": block}})
        loaded = load_job(base / "job.yaml")
        chosen = choose_target(loaded, None)
        self.cluster, self.target = cluster, KubernetesTarget(chosen)
        submission = submission_of(loaded, chosen, base)
        self.target.check(submission)
        self.record: Record = self.target.submit(submission)
        self.run = RunFolder(cluster.folder / "claims" / "runs" / "runs" / "tiny")

    def until(self, what: Callable[[], bool], seconds: float = 250) -> None:
        end = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < end, (self.target.status(self.record), *self.lines()[-40:])
            time.sleep(0.1)

    def reach(self, step: int) -> None:
        self.until(lambda: self.run.metrics.is_file() and len(self.run.read_metrics()) >= step)

    def end(self) -> None:
        self.until(lambda: self.state() in ("done", "failed"))
        assert self.state() == "done", self.lines()[-60:]

    def state(self) -> str:
        return self.target.status(self.record).state

    def lines(self) -> list[str]:
        return list(self.target.logs(self.record, rank=None, follow=False))


@pytest.fixture
def submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Submitted]]:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "cluster"
    folder.mkdir()
    with ApiServer(folder, {"alpha": {}, "beta": {}}, {IMAGE}) as cluster:
        yield lambda pause=0.01, **keys: Submitted(tmp_path, cluster, pause=pause, **keys)


def assert_alike(ran: RunFolder, other: RunFolder) -> None:
    """The same losses, weights and samples, to the bit."""
    lines = [folder.read_metrics() for folder in (ran, other)]
    assert [(line["step"], line["samples"]) for line in lines[0]] == [(x["step"], x["samples"]) for x in lines[1]]
    assert [line["step"] for line in lines[0]] == list(range(1, STEPS + 1))
    for one, two in zip(*lines, strict=True):
        assert one["loss"] == two["loss"], one["step"]
    states = [Store(folder.checkpoints).load(STEPS) for folder in (ran, other)]
    for name, tensor in states[0].tensors.items():
        assert torch.equal(tensor, states[1].tensors[name]), name


@pytest.mark.parametrize("kind", ["job", "jobset"])
@pytest.mark.often("jobset")
def test_two_pods_train_as_one_machine(submitted: Callable[..., Submitted], tmp_path: Path, kind: str) -> None:
    """The job with which the tests of ssh, Slurm and Ray compare, too: the same losses to the bit."""
    lab = Lab(tmp_path, tmp_path)
    lab.prepare(output="runs/tiny")
    lab.stoker("train", "job.yaml", "output=runs/local")
    run = submitted(pause=0, kind=kind, job=json.loads((tmp_path / "job.yaml").read_text()))
    lines = list(run.target.logs(run.record, rank=None, follow=True))
    run.end()
    assert losses(run.run.path) == losses(tmp_path / "runs/local") != []
    assert any("rank 0 to 0 of 2" in line for line in lines) and any("rank 1 to 1 of 2" in line for line in lines)


def test_an_evicted_pod_joins_again(submitted: Callable[..., Submitted], whole: Callable[[int], RunFolder]) -> None:
    run = submitted(retries=0)
    run.reach(5)
    victim = next(p for p in run.cluster.all("pods") if p["metadata"]["labels"][INDEX] == "1")
    run.cluster.controllers.evict(victim["metadata"]["name"])
    run.end()
    assert_alike(run.run, whole(2))


@pytest.mark.exhaustive
def test_a_stopped_run_goes_on_where_it_was(
    submitted: Callable[..., Submitted], whole: Callable[[int], RunFolder]
) -> None:
    run = submitted()
    run.reach(5)
    run.target.stop(run.record)
    run.until(lambda: run.state() == "stopped" and not run.cluster.all("pods"))
    steps = len(run.run.read_metrics())
    assert 5 <= steps < STEPS
    assert run.target.resume(run.record) == run.record
    run.end()
    assert_alike(run.run, whole(2))
