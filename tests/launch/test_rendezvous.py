"""Processes that agents started find those of the same start, whatever earlier ones have left in the store."""

from __future__ import annotations

import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from stoker.job import load_job
from stoker.launch.exit_guard import own_hang
from stoker.launch.rendezvous import private_store
from stoker.launch.run_spec import RunSpec
from stoker.resilience.heartbeat import Heart

WORLD = 3


def met(store: dist.Store, rank: int, timeout: float = 30.0) -> str:
    """What this process reads of rank 0's in the store of its start."""
    own = private_store(store, rank=rank, world=WORLD, timeout=timeout)
    if rank == 0:
        own.set("said", uuid.uuid4().hex)
    return own.get("said").decode()


def start(store: dist.Store, order: list[int], pause: float = 0.0) -> set[str]:
    with ThreadPoolExecutor(WORLD) as threads:
        running = []
        for rank in order:
            running.append(threads.submit(met, store, rank))
            time.sleep(pause)
        return {each.result() for each in running}


def test_each_start_has_a_part_of_the_store_for_itself() -> None:
    store = dist.HashStore()
    seen = [start(store, order, pause) for order, pause in (([0, 1, 2], 0), ([2, 1, 0], 0.1), ([1, 0, 2], 0.1))]
    assert all(len(said) == 1 for said in seen) and len(set().union(*seen)) == 3


def test_what_processes_of_earlier_starts_left_is_not_taken_for_an_answer() -> None:
    """The store keeps keys of a start that failed: rank 1 was there, and rank 0 had answered it."""
    store = dist.HashStore()
    with pytest.raises(RuntimeError, match=r"ranks \[1, 2\] have not come within"):
        met(store, 0, timeout=0.1)
    with pytest.raises(dist.DistStoreError):
        met(store, 1, timeout=0.1)
    assert len(start(store, [0, 2, 1], 0.1)) == 1


JOB = """
task: module
module: {model: "torch.nn:Linear", loss: "torch.nn:MSELoss", data: "torch:ones"}
steps: 2
output: run
train: {batch: 4}
faults: {hang: 0.3}
"""
WAITING = """
import sys, time
sys.path.insert(0, sys.argv[1])
from stoker.launch.exit_guard import start_exit_guard
from test_rendezvous import silent
start_exit_guard(*silent("train"), 1)
time.sleep(60)
"""


def silent(phase: str) -> tuple[Heart, RunSpec]:
    """A process that did a step, and has been silent since."""
    spec = RunSpec(load_job("job.yaml"), Path.cwd(), Path.cwd() / "run")
    heart = Heart()
    for did in ("data", "train", "optimizer", phase):
        heart.beat(did, 1)
    return heart, spec


@pytest.mark.slow
def test_a_process_that_waits_for_ever_ends_itself(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "run").mkdir()
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", WAITING, str(Path(__file__).parent)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and time.monotonic() - begun < 50
    assert "error: rank 1: process" in done.stderr and "stopped in step 1, at `train`: no sign of life" in done.stderr
    assert "in <module>" in (tmp_path / "run" / "logs" / "stack-1.txt").read_text()


BROKEN = """
from pathlib import Path
Path("run/logs").touch()
"""
HANGING = """
import time
from stoker.launch import exit_guard
exit_guard.REPORT = 0.2
exit_guard.stack_file = lambda *_: time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize("disk", [BROKEN, HANGING])
def test_it_ends_also_where_its_report_cannot_be_written(disk: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "run").mkdir()
    command = [sys.executable, "-c", disk + WAITING, str(Path(__file__).parent)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=50)
    assert done.returncode == 1
    assert disk == HANGING or "error: rank 1: process" in done.stderr


@pytest.mark.parametrize("phase", ["train", "end", "prepare", "save"])
def test_not_everything_that_takes_long_has_stopped(
    phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(JOB)
    heart, spec = silent(phase)
    assert own_hang(heart, spec, 1) is None
    time.sleep(0.4)
    assert (own_hang(heart, spec, 1) is not None) == (phase == "train")
