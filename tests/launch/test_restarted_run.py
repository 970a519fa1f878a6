"""A real run whose processes are killed and stopped comes to the losses and weights of an undisturbed one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.checkpoint.dcp_store import Store
from stoker.resilience.fault_injection import Fault, write_faults
from stoker.runs.run_folder import RunFolder
from stoker.runs.shm_folder import shared_folder

pytestmark = [pytest.mark.pool, pytest.mark.slow, pytest.mark.usefixtures("warm_processes")]

STEPS = 14
JOB = """
task: module
module: {model: "made:network", loss: "torch.nn.functional:mse_loss", data: "made:data"}
steps: 14
train: {batch: 4, precision: fp64}
checkpoint: {every: 5, best: false}
faults: {back_off: 0, hang: 3}
"""
MADE = """
import torch
from torch import nn
def network():
    return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 2)).double()
def data():
    made = torch.Generator().manual_seed(1)
    samples = torch.randn(64, 5, generator=made, dtype=torch.float64)
    return torch.utils.data.TensorDataset(samples[:, :3], samples[:, 3:])
"""


def train(base: Path, *words: str, code: int = 0) -> str:
    (base / "job.yaml").write_text(JOB)
    (base / "made.py").write_text(MADE)
    done = subprocess.run(
        [sys.executable, "-m", "stoker", "train", "job.yaml", *words],
        cwd=base,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(base)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == code, done.stderr + done.stdout
    return done.stdout


def events(folder: RunFolder, name: str) -> list[dict[str, Any]]:
    return [event for event in folder.read_events() if event["event"] == name]


def assert_alike(ran: RunFolder, whole: RunFolder) -> None:
    losses = [[(line["step"], line["loss"]) for line in folder.read_metrics()] for folder in (ran, whole)]
    assert losses[0] == losses[1] and [step for step, _ in losses[0]] == list(range(1, STEPS + 1))
    states = [Store(folder.checkpoints).load(STEPS) for folder in (ran, whole)]
    assert states[0].tensors.keys() == states[1].tensors.keys()
    for name, tensor in states[0].tensors.items():
        assert torch.equal(tensor, states[1].tensors[name]), name


@pytest.mark.parametrize(
    ("processes", "faults"),
    [
        (1, [Fault("kill", 4)]),
        (2, [Fault("kill", 3, rank=1), Fault("hang", 7, rank=0), Fault("kill", 12, rank=0)]),
    ],
)
def test_as_if_nothing_had_happened(tmp_path: Path, processes: int, faults: list[Fault]) -> None:
    words = f"parallel.data={processes}"
    train(tmp_path, words, "output=whole")
    folder = RunFolder(tmp_path / "run")
    write_faults(folder, faults)
    out = train(tmp_path, words, "output=run")
    assert_alike(folder, RunFolder(tmp_path / "whole"))
    assert [(e["rank"], e["cause"]) for e in events(folder, "fault")] == [
        (fault.rank, "exit" if fault.kind == "kill" else "hung") for fault in faults
    ]
    restarted = events(folder, "restarted")
    assert len(restarted) == len(faults) and out.count("starting again (1 of 3)") == len(faults)
    assert len(events(folder, "checked")) == 1 + len(faults)
    lost = [died["step"] - (again["step"] - 1) for died, again in zip(events(folder, "fault"), restarted, strict=True)]
    assert max(lost) <= 5  # no more than a checkpoint interval
    whole = events(RunFolder(tmp_path / "whole"), "checked")
    assert whole[0]["found"] == [] and len(whole[0]["gflops"]) == processes


def test_a_run_that_a_scheduler_ends_says_that_it_is_to_be_started_again(tmp_path: Path) -> None:
    """SIGTERM to the whole group, as schedulers send it: every process gets it, the server of forks too."""
    (tmp_path / "made.py").write_text(MADE)
    (tmp_path / "job.yaml").write_text(JOB)
    process = subprocess.Popen(
        [sys.executable, "-m", "stoker", "train", "job.yaml", "steps=1000000", "output=run", "faults.requeue=99"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    while not process.stdout.readline().startswith("step 3/"):
        assert process.poll() is None, process.communicate()
    os.killpg(process.pid, signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 99, err + out
    assert "to continue: stoker train job.yaml" in out
    folder = RunFolder(tmp_path / "run")
    step = folder.read_metrics()[-1]["step"]
    assert Store(folder.checkpoints).steps()[-1] == step and folder.read_events()[-1]["event"] == "stopped"


def test_a_stop_before_a_restart_keeps_the_state_in_memory(tmp_path: Path) -> None:
    words = ["parallel.data=2", "checkpoint.every=1000", "checkpoint.memory=2"]
    train(tmp_path, *words, "output=whole")
    folder = RunFolder(tmp_path / "run")
    write_faults(folder, [Fault("kill", 8, rank=1)])
    process = subprocess.Popen(
        [sys.executable, "-m", "stoker", "train", "job.yaml", *words, "output=run", "faults.back_off=100"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    while not process.stdout.readline().startswith("starting again"):
        assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM and "is kept in this machine's memory" in err
    assert not folder.checkpoints.exists()
    train(tmp_path, *words, "output=run")
    (resumed,) = events(folder, "resumed")
    assert resumed["where"] == "memory" and resumed["step"] in (6, 7)
    assert_alike(folder, RunFolder(tmp_path / "whole"))
    assert not shared_folder(folder.path).exists()
