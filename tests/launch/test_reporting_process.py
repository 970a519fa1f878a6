"""Which process of a launcher's reports what all of them meet."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator

import psutil
import pytest

from stoker.launch import reporting_process
from stoker.launch.cluster_env import RankInfo
from stoker.launch.reporting_process import reported_elsewhere

TORCHRUN = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("local", "same", "other"),
    [("LOCAL_RANK", TORCHRUN, {"MASTER_PORT": "2"}), ("SLURM_LOCALID", SLURM, {"SLURM_STEP_ID": "1"})],
)
def test_the_first_process_of_the_same_start_reports_an_error(
    monkeypatch: pytest.MonkeyPatch,
    started: list[subprocess.Popen[bytes]],
    local: str,
    same: dict[str, str],
    other: dict[str, str],
) -> None:
    for name, value in {**same, local: "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(reporting_process, "SECONDS_TO_REPORT", 1.5)
    second = RankInfo(1, 3, 1, 3)
    for environment in ({**same, local: "2"}, {**same, **other, local: "0"}):
        started.append(subprocess.Popen(["sleep", "60"], env={**os.environ, **environment}))
    assert reported_elsewhere(second)  # the first has ended
    started.append(subprocess.Popen(["sleep", "0.5"], env={**os.environ, **same, local: "0"}))
    begun = time.monotonic()
    assert reported_elsewhere(second) and time.monotonic() - begun > 0.2
    started.append(subprocess.Popen(["sleep", "60"], env={**os.environ, **same, local: "0"}))
    while psutil.Process(started[-1].pid).environ().get(local) != "0":  # until it has its own
        time.sleep(0.01)
    assert not reported_elsewhere(second)  # it does not meet the error
    assert not reported_elsewhere(RankInfo(0, 3, 0, 3))
