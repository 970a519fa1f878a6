"""Starts an entry of `entries.py` in the processes of a run, from a process in a session of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

JOB = """
task: module
module: {model: "torch.nn:Linear", loss: "torch.nn:MSELoss", data: "torch:ones"}
steps: 2
train: {batch: 4}
parallel: {data: 2}
faults: {%s}
"""
BEGUN: list[subprocess.Popen[str]] = []


def end_all() -> None:
    """A test that fails leaves no process behind either: the ranks end with the process that began them."""
    while BEGUN:
        BEGUN.pop().kill()


def begin(base: Path, entry: str, faults: str = "restarts: 0") -> subprocess.Popen[str]:
    """The entry in two processes."""
    (base / "job.yaml").write_text(JOB % faults)
    own = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys, entries; sys.exit(entries.start(sys.argv[1]))", entry],
        cwd=base,
        env={**own, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), own.get("PYTHONPATH", "")])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    BEGUN.append(process)
    return process


def process_ids(base: Path, process: subprocess.Popen[str]) -> list[int]:
    """Waits for both ranks to be at work."""
    paths = [base / f"pid-{rank}" for rank in range(2)]
    deadline = time.monotonic() + 120
    while not all(path.exists() and path.read_text() for path in paths):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.02)
    return [int(path.read_text()) for path in paths]


def assert_gone(pids: list[int], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while any(map(psutil.pid_exists, pids)):
        assert time.monotonic() < deadline, pids
        time.sleep(0.05)
