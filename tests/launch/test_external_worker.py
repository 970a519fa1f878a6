"""A process that a launcher started joins the others; a wrong number of them is one clear error."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from stoker.errors import RunFailed
from stoker.hardware.host_facts import HostFacts
from stoker.job import load_job
from stoker.launch import external_worker, host_settings
from stoker.launch.cluster_env import RankInfo
from stoker.launch.first_failure import RankFailed, failure_of
from stoker.launch.run_spec import RunSpec
from stoker.runs.shm_folder import shared_folder

pytestmark = [pytest.mark.pool, pytest.mark.usefixtures("warm_processes")]

JOB = """
task: module
module: {model: "made:network", loss: "torch.nn.functional:mse_loss", data: "made:data"}
steps: 3
output: run
train: {batch: 4, precision: fp64}
parallel: {data: 2}
"""
MADE = """
import torch
from torch import nn
def network():
    return nn.Linear(3, 2).double()
def data():
    made = torch.Generator().manual_seed(1)
    samples = torch.randn(16, 5, generator=made, dtype=torch.float64)
    return torch.utils.data.TensorDataset(samples[:, :3], samples[:, 3:])
"""


BEGUN: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def none_left() -> Iterator[None]:
    """A test that fails leaves no process behind."""
    yield
    while BEGUN:
        BEGUN.pop().kill()


def stoker(base: Path, *words: str, **environment: str) -> subprocess.Popen[str]:
    if not (base / "made.py").exists():  # else a process that runs may read half of a file
        (base / "job.yaml").write_text(JOB)
        (base / "made.py").write_text(MADE)
    own = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(base)}
    process = subprocess.Popen(
        [sys.executable, "-m", "stoker", "train", "job.yaml", *words],
        cwd=base,
        env={**own, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    BEGUN.append(process)
    return process


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def launched(base: Path, *words: str, world: int) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each of the processes that a launcher starts."""
    port = free_port()
    ranks = [
        {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
        for rank in range(world)
    ]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [stoker(base, *words, **rank, **meeting) for rank in ranks]
    said = [process.communicate(timeout=280) for process in processes]
    return [(process.returncode, *each) for process, each in zip(processes, said, strict=True)]


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_joined_started_and_alone_train_alike(tmp_path: Path) -> None:
    """The same job in two processes that a launcher started, in two that stoker starts, and in one."""
    (joined, out, err), (second, quiet, _) = launched(tmp_path, "output=joined", world=2)
    assert (joined, second) == (0, 0), err
    assert "done: joined" in out and quiet == ""

    started = stoker(tmp_path, "output=started", "--json")
    out, err = started.communicate(timeout=280)
    assert started.returncode == 0, err
    assert out.count("\n") == 1 and '"state": "done"' in out and '"step": 3' in out

    alone = stoker(tmp_path, "output=alone", "parallel.data=1")
    _, err = alone.communicate(timeout=280)
    assert alone.returncode == 0, err
    assert losses(tmp_path / "joined") == pytest.approx(losses(tmp_path / "alone"), abs=1e-12)
    assert losses(tmp_path / "started") == pytest.approx(losses(tmp_path / "alone"), abs=1e-12)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_as_many_processes_as_the_layout_wants(tmp_path: Path) -> None:
    (code, _, err), *others = launched(tmp_path, world=3)
    assert code == 2
    assert err.startswith("error: the launcher started 3 processes, and the job's layout (data 2) needs 2; start 2")
    assert [(code, err) for code, _, err in others] == [(2, "")] * 2 and not (tmp_path / "run").exists()


@pytest.mark.slow
def test_what_all_find_wrong_is_told_by_one(tmp_path: Path) -> None:
    (code, _, err), (other, _, quiet) = launched(tmp_path, "module.data=made:nothing", world=2)
    assert (code, other) == (2, 2)
    assert (err + quiet).count("error:") == 1 and "made" in err + quiet
    assert not (tmp_path / "run").exists()


def test_the_first_process_says_what_is_lacking_and_each_machine_what_is_set_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    spec = RunSpec(load_job(tmp_path / "job.yaml"), tmp_path, tmp_path / "run")
    facts = HostFacts(gpus=("NVIDIA GeForce RTX 4090",) * 2, shm=2**36)
    monkeypatch.setattr(host_settings, "host_facts", lambda: facts)
    monkeypatch.setattr(external_worker, "start_exit_guard", lambda *_: None)
    seen: dict[str, str] = {}
    monkeypatch.setattr(external_worker, "train", lambda *_, **__: seen.update(os.environ))
    set_here = "host       NCCL_P2P_DISABLE=1 (NVIDIA GeForce RTX 4090: no peer access); NCCL_IB_DISABLE=1"
    for rank, lacks, host in ((0, True, True), (1, False, False), (2, False, True)):
        monkeypatch.setattr(os, "environ", {"MASTER_ADDR": "10.0.0.1"})
        external_worker.train_as_member(spec, RankInfo(rank, 4, rank % 2, 2), nullcontext(lambda *_: None))
        out = capsys.readouterr().out
        assert (external_worker.LACKS in out, set_here in out) == (lacks, host)
        assert seen["NCCL_P2P_DISABLE"] == seen["NCCL_IB_DISABLE"] == "1"
    monkeypatch.setattr(os, "environ", {"MASTER_ADDR": "10.0.0.1", "NCCL_IB_DISABLE": "0"})
    quiet_spec = replace(spec, quiet=True)  # as with --json
    external_worker.train_as_member(quiet_spec, RankInfo(0, 4, 0, 2), nullcontext(lambda *_: None))
    assert capsys.readouterr().out == "" and seen["NCCL_IB_DISABLE"] == "0"


def test_failures_of_an_earlier_larger_world_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external_worker, "SETTLE", 0.0)
    (tmp_path / "job.yaml").write_text(JOB)
    spec = RunSpec(load_job(tmp_path / "job.yaml"), tmp_path, tmp_path / "run")
    spec.logs.mkdir(parents=True)
    failure_of(RunFailed("long ago"), 5).write(spec.failure_of(5))
    found = external_worker._failures_beside(RunFailed("now"), spec, RankInfo(1, 2, 1, 2))
    assert [(failure.rank, str(failure.problems[0])) for failure in found] == [(1, "now")]
    spec.failure_of(1).unlink()
    spec.failure_of(1).mkdir()  # it cannot be written
    assert external_worker._failures_beside(RunFailed("now"), spec, RankInfo(1, 2, 1, 2)) == []


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunSpec:
    """A job whose member neither guards itself nor writes."""
    (tmp_path / "job.yaml").write_text(JOB)
    monkeypatch.setattr(external_worker, "start_exit_guard", lambda *_: None)
    return RunSpec(load_job(tmp_path / "job.yaml"), tmp_path, tmp_path / "run", quiet=True)


@pytest.mark.parametrize(("world", "bound"), [(2, {"lo"}), (4, set())])
def test_the_groups_of_one_machine_bind_to_loopback(
    spec: RunSpec, monkeypatch: pytest.MonkeyPatch, world: int, bound: set[str]
) -> None:
    """Else they would take connections from the network."""
    seen: dict[str, str] = {}
    monkeypatch.setattr(external_worker, "train", lambda *_, **__: seen.update(os.environ))
    monkeypatch.setattr(os, "environ", {"MASTER_ADDR": "127.0.0.1"})
    external_worker.train_as_member(spec, RankInfo(0, world, 0, 2), nullcontext(lambda *_: None))
    assert {value for name, value in seen.items() if name == "GLOO_SOCKET_IFNAME"} == bound


def test_a_failure_of_an_earlier_start_is_forgotten(spec: RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    spec.logs.mkdir(parents=True)
    for rank in range(2):
        failure_of(RunFailed("long ago"), rank).write(spec.failure_of(rank))
    monkeypatch.setattr(external_worker, "train", lambda *_, **__: None)
    external_worker.train_as_member(spec, RankInfo(1, 2, 1, 2), nullcontext(lambda *_: None))
    assert spec.failure_of(0).exists() and not spec.failure_of(1).exists()  # each process removes its own


@pytest.mark.parametrize(("number", "kept"), [(0, True), (1, True), (2, False)])
def test_memory_is_left_for_the_restarts_of_a_launcher_and_not_longer(spec: RunSpec, number: int, kept: bool) -> None:
    """The agent makes two restarts; the first start empties the folder, and the last one removes it."""
    starts = external_worker._Starts(("127.0.0.1", 1), number, 2)
    spec.output.mkdir()
    shared = shared_folder(spec.output)
    shared.mkdir(mode=0o700)
    (shared / "copy").touch()
    try:
        with pytest.raises(RankFailed), external_worker._taken(spec, RankInfo(0, 1, 0, 1), starts):
            assert (shared / "copy").exists() == (number > 0)
            raise RankFailed("it died")
        assert shared.exists() == kept
    finally:
        shutil.rmtree(shared, ignore_errors=True)


def test_an_agent_is_known_by_its_store() -> None:
    own = {"MASTER_ADDR": "here", "MASTER_PORT": "7"}
    counts = {"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_MAX_RESTARTS": "3"}
    of = external_worker._Starts.of
    assert of({**own, **counts, "TORCHELASTIC_USE_AGENT_STORE": "True"}) == external_worker._Starts(("here", 7), 1, 3)
    assert of({**own, **counts, "TORCHELASTIC_USE_AGENT_STORE": "False"}) is None and of(own) is None
