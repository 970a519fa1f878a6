"""Ray for real: a head and three nodes on this machine; the same losses as without it, and a node that goes."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
from lab import LONG, PAUSE, Lab, losses

pytest.importorskip("ray", reason="the extra `ray` is not installed")
pytestmark = [pytest.mark.timeout(900), pytest.mark.slow, pytest.mark.pool]  # a Ray cluster takes 20 s to come up


class RayLab(Lab):
    """A lab whose nodes are Ray's."""

    cluster: subprocess.Popen[str]
    block: dict[str, Any]

    def say(self, line: str) -> str:
        """Gives the cluster a command; its answer."""
        assert self.cluster.stdin is not None and self.cluster.stdout is not None
        self.cluster.stdin.write(f"{line}\n")
        self.cluster.stdin.flush()
        return self.cluster.stdout.readline().strip()


def started() -> tuple[subprocess.Popen[str], int]:
    """A cluster and its port. Ray gives a node 30 seconds to come up, at times too few beside other tests."""
    script = Path(__file__).with_name("ray_lab.py")
    for _ in range(3):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        cluster = subprocess.Popen([sys.executable, script, str(port)], stdin=PIPE, stdout=PIPE, text=True)
        assert cluster.stdout is not None
        if cluster.stdout.readline().strip() == "up":
            return cluster, port
        cluster.communicate()
    raise AssertionError("the cluster does not come up")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayLab]:
    made = RayLab(tmp_path_factory.mktemp("shared"), tmp_path_factory.mktemp("base"))
    made.prepare()
    made.cluster, port = started()
    with made.cluster:
        assert made.cluster.stdin is not None
        made.block = {"address": f"http://127.0.0.1:{port}", "nodes": 2, "python": sys.executable}
        made.block |= {"folder": str(made.folder), "forward": ["OMP_NUM_THREADS"], "environment": {"PAUSE": str(PAUSE)}}
        made.target("ray", ray=made.block)
        try:
            yield made
        finally:
            made.cluster.stdin.close()
            made.cluster.wait(60)


def test_ray_trains_a_job_as_here(lab: RayLab) -> None:
    lab.stoker("train", "job.yaml", "output=runs/local")
    lab.stoker("submit", "job.yaml", "--on", "ray", "output=runs/ray")
    lines = lab.stoker("logs", "ray", "-f").splitlines()
    assert {"rank 0", "rank 1", "stoker"} <= {line.partition(" | ")[0] for line in lines}, "\n".join(lines)
    assert any(line.startswith("stoker | placed on ") for line in lines)
    assert lab.status("ray")["status"]["state"] == "done"
    assert losses(lab.folder / "ray/runs/ray") == losses(lab.base / "runs/local")
    assert lab.stoker("logs", "ray", "--rank", 1).splitlines()


def test_a_cluster_that_can_never_hold_the_nodes_is_refused(lab: RayLab) -> None:
    said = lab.stoker("submit", "job.yaml", "--on", "ray", "parallel.data=4", code=3)
    assert "targets.yaml:1:" in said and "2 nodes with 2 CPU are wanted, and of Ray's 4 nodes 0 have that" in said


def test_a_supervisor_that_cannot_start_is_named(lab: RayLab) -> None:
    lab.target("homeless", ray={**lab.block, "folder": "~nobody-here/runs"})
    lab.stoker("submit", "job.yaml", "--on", "homeless", "output=runs/nowhere")
    assert "Could not determine home directory" in lab.stoker("logs", "nowhere", "-f")
    assert lab.status("nowhere")["status"]["state"] == "failed"


@pytest.mark.exhaustive
def test_a_run_is_stopped_and_goes_on_although_a_node_goes(lab: RayLab) -> None:
    lab.stoker("train", "long.yaml", "output=runs/long")
    output = lab.folder / "again/runs/again"
    lab.stoker("submit", "long.yaml", "--on", "ray", "output=runs/again")
    lab.until(lambda: (output / "metrics.jsonl").exists() and len(losses(output)) > 20)
    assert "again: stopped" in lab.stoker("stop", "again")
    saved = len(losses(output))
    assert 20 < saved < LONG["steps"]
    lab.stoker("resume", "again")
    lab.until(lambda: len(losses(output)) > saved + 20)
    assert lab.say("remove") == "removed"
    lab.until(lambda: '"done"' in (output / "events.jsonl").read_text())
    lab.until(lambda: lab.status("again")["status"]["state"] != "running")
    assert lab.status("again")["status"]["state"] == "done", lab.stoker("logs", "again")
    assert losses(output) == losses(lab.base / "runs/long")
    known = json.loads(lab.stoker("runs", "--on", "ray", "--json"))
    assert {run["name"]: run["status"]["state"] for run in known}["again"] == "done"
