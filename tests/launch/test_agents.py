"""Two agents of torchrun, as on two machines: one of their processes is killed, or an agent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from starting import assert_gone
from test_external_worker import free_port

from made_module import made_module
from stoker.checkpoint.dcp_store import Store
from stoker.runs.run_folder import RunFolder

pytestmark = [pytest.mark.pool, pytest.mark.slow]

STEPS = 60
JOB = """
task: module
module: {model: "made:network", loss: "torch.nn.functional:mse_loss", data: "made:data"}
steps: 60
output: run
train: {batch: 4, precision: fp64}
parallel: {data: 2}
checkpoint: {every: 10, best: false, memory: 1}
"""
MADE = made_module("nn.Dropout(0.2)")
NOTICED = 90.0  # seconds until training goes on; alone on the machine: 6
BEGUN: list[subprocess.Popen[bytes]] = []


@pytest.fixture(autouse=True)
def none_left() -> Iterator[None]:
    yield
    for agent in BEGUN:
        agent.kill()  # its process ends with it
        agent.wait()
    BEGUN.clear()


def start(base: Path, words: list[str], log: str, **environment: str) -> subprocess.Popen[bytes]:
    (base / "job.yaml").write_text(JOB)
    (base / "made.py").write_text(MADE)
    paths = os.pathsep.join([str(base), os.environ.get("PYTHONPATH", "")])
    own = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, **environment}
    with (base / log).open("wb") as file:
        return subprocess.Popen([sys.executable, "-m", *words], cwd=base, env=own, stdout=file, stderr=file)


def start_agents(base: Path, rendezvous: str) -> None:
    port = free_port()
    for node in range(2):
        where = {
            "static": [f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={port}"],
            "c10d": [f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-id={port}"],
        }[rendezvous]
        launcher = ["torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=2"]
        words = [*launcher, f"--rdzv-backend={rendezvous}", *where, "-m", "stoker", "train", "job.yaml"]
        BEGUN.append(start(base, words, f"agent-{node}.log", PAUSE="0.03"))


def wait_for(what: Callable[[], bool], base: Path, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        logs = [(base / f"agent-{node}.log").read_text()[-3000:] for node in range(2)]
        assert time.monotonic() < deadline and all(agent.poll() is None for agent in BEGUN), logs
        time.sleep(0.05)


def steps_done(base: Path) -> int:
    path = base / "run" / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def workers() -> list[psutil.Process]:
    """The process that trains, of each agent."""
    return [child for agent in BEGUN for child in psutil.Process(agent.pid).children()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """The run of the same job that nothing happened to, whose two processes stoker starts itself."""
    base = tmp_path_factory.mktemp("whole")
    assert start(base, ["stoker", "train", "job.yaml", "output=whole"], "whole.log").wait() == 0
    return RunFolder(base / "whole")


@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
@pytest.mark.exhaustive
def test_a_killed_process_is_noticed_and_the_run_ends_as_if_nothing_had_happened(
    rendezvous: str, whole: RunFolder, tmp_path: Path
) -> None:
    start_agents(tmp_path, rendezvous)
    for node, at in enumerate((13, 27)):
        wait_for(lambda at=at: steps_done(tmp_path) >= at, tmp_path)  # type: ignore[misc]
        workers()[node].send_signal(signal.SIGKILL)
        done = steps_done(tmp_path)
        wait_for(lambda done=done: steps_done(tmp_path) > done + 2, tmp_path, NOTICED)  # type: ignore[misc]
    assert [agent.wait(120) for agent in BEGUN] == [0, 0]

    ran = RunFolder(tmp_path / "run")
    resumed = [event for event in ran.read_events() if event["event"] == "resumed"]
    assert [event["where"] for event in resumed] == ["memory"] * 2
    losses = [[(line["step"], line["loss"]) for line in folder.read_metrics()] for folder in (ran, whole)]
    assert losses[0] == losses[1] and len(losses[0]) == STEPS
    states = [Store(folder.checkpoints).load(STEPS) for folder in (ran, whole)]
    for name, tensor in states[0].tensors.items():
        assert torch.equal(tensor, states[1].tensors[name]), name


def test_an_agent_that_is_killed_takes_its_process_with_it(tmp_path: Path) -> None:
    start_agents(tmp_path, "static")
    wait_for(lambda: steps_done(tmp_path) >= 5, tmp_path)
    theirs, other = workers()[1].pid, workers()[0].pid
    BEGUN[1].kill()
    BEGUN[1].wait()
    assert_gone([theirs, other], 20)
    said = (tmp_path / "agent-0.log").read_text()
    assert "another process of the run has ended" in said and "resumes from its newest state" in said
    failed = [event for event in RunFolder(tmp_path / "run").read_events() if event["event"] == "failed"]
    assert len(failed) == 1 and json.dumps(failed[0])
