"""What a run listens on: loopback or nothing, and nobody else's words are unpickled or imported."""

from __future__ import annotations

import pickle
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from stoker.launch.cluster_env import RankInfo
from stoker.launch.process_pool import Pool

pytestmark = pytest.mark.pool
LOOPBACK = "127.0.0.1"
JOB = """
task: module
module: {model: "own:Line", loss: "own:loss", data: "own:Points"}
steps: 1000000
output: run
train: {batch: 4, precision: fp32}
checkpoint: {every: 5}
evaluate: {fraction: 0.0}
"""
# The user's own code, which the job names; it goes on until the test has looked.
OWN = """
import time
from pathlib import Path
import signal, os, torch

class Line(torch.nn.Linear):
    def __init__(self):
        super().__init__(2, 1)

class Points(torch.utils.data.Dataset):
    def __len__(self):
        return 1000
    def __getitem__(self, index):
        time.sleep(0.005)
        return torch.ones(2) * index, torch.ones(1)

loss = torch.nn.functional.mse_loss
"""


class Evil:
    """An object whose pickle makes a file when it is read."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.mark,)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "own.py").write_text(OWN)
    for name in ("json", "psutil", "logging", "subprocess", "selectors", "mmap"):  # a stranger's, in the same folder
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'a').write(__name__)\n")
    return tmp_path


@pytest.fixture(params=[1, 2])
def running(request: pytest.FixtureRequest, base: Path) -> Iterator[subprocess.Popen[str]]:
    """``stoker train`` in the middle of its training, in one process and in two."""
    script = base / "bin" / "stoker"  # as the installed command: its own folder, and not the current one, is searched
    script.parent.mkdir()
    script.write_text(
        "import sys\nfrom stoker.cli.main import main\nif __name__ == '__main__':\n    sys.exit(main())\n"
    )
    command = [sys.executable, str(script), "train", "job.yaml", f"parallel.data={request.param}", "--json"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, cwd=base, text=True, **pipes)  # type: ignore[call-overload]
    deadline = time.monotonic() + 120
    while not list(base.glob("run/checkpoints/step-*")):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)
    yield process
    process.kill()
    process.communicate()


def listening(process: psutil.Process) -> list[tuple[str, int]]:
    """What a process takes messages from: listening TCP sockets, and all of UDP."""
    found = process.net_connections("inet")
    return [tuple(c.laddr) for c in found if c.status == psutil.CONN_LISTEN or c.type == socket.SOCK_DGRAM]


def attack(port: int, mark: Path) -> None:
    """Writes pickles into the store that may listen there, and as the first of a group's peers."""
    evil = pickle.dumps(Evil(mark))

    def write() -> None:
        with suppress(RuntimeError):  # there is no store
            store = dist.TCPStore(LOOPBACK, port, is_master=False, timeout=timedelta(seconds=1))
            for key in ("torch.rendezvous", "default_pg/0//0//0"):
                store.set(key, evil)

    writer = threading.Thread(target=write, daemon=True)  # a port that does not answer as a store holds it without end
    writer.start()
    writer.join(2.0)
    for number in range(4):
        with socket.create_connection((LOOPBACK, port)) as peer:
            peer.sendall(struct.pack("<q", number) + evil)


@pytest.mark.often("2")
@pytest.mark.slow
def test_a_run_listens_on_loopback_alone_and_reads_no_pickle(running: subprocess.Popen[str], base: Path) -> None:
    tree = [psutil.Process(running.pid), *psutil.Process(running.pid).children(recursive=True)]
    found = [address for process in tree for address in listening(process)]
    world = len(list((base / "run" / "logs").glob("rank-*.log")))
    assert bool(found) == (world > 1)
    assert {host for host, _ in found} <= {LOOPBACK}
    for process in tree:
        for connection in process.net_connections("unix"):
            if path := connection.laddr:  # of the server of forks, in a folder of this user's alone
                assert not path.startswith("@") and Path(path).parent.stat().st_mode & 0o077 == 0, path
    for _, port in found:
        attack(port, base / "ran")
    steps = len((base / "run" / "metrics.jsonl").read_bytes().splitlines())
    deadline = time.monotonic() + 60
    while len((base / "run" / "metrics.jsonl").read_bytes().splitlines()) < steps + 5:  # it goes on
        assert running.poll() is None and time.monotonic() < deadline, running.communicate()
        time.sleep(0.05)
    running.terminate()
    _, error = running.communicate(timeout=120)
    assert running.returncode == 143, error
    assert not (base / "ran").exists() and not (base / "imported").exists()


def bound() -> list[tuple[str, int]]:
    dist.barrier()
    return listening(psutil.Process())


def test_a_pool_listens_on_loopback_alone(pool: Pool) -> None:
    found = pool.run(bound, world=2)
    assert all(found) and {host for own in found for host, _ in own} == {LOOPBACK}
    assert listening(psutil.Process()) == []


def read_from_a_stranger(mark: Path) -> str:
    """Rank 1 sends what a process without the run's secret could."""
    sealing = distributed_c10d._pickler
    try:
        if dist.get_rank() == 1:
            distributed_c10d._pickler = pickle.Pickler
        dist.all_gather_object([None, None], Evil(mark) if dist.get_rank() == 1 else None)
    except ConnectionError as error:
        return str(error)
    finally:
        distributed_c10d._pickler = sealing
    return ""


def test_objects_of_a_process_without_the_secret_are_not_unpickled(pool: Pool, tmp_path: Path) -> None:
    expected = "an object came from a process that does not belong to this run"
    assert pool.run(read_from_a_stranger, tmp_path / "ran", world=2) == [expected] * 2
    assert not (tmp_path / "ran").exists()


def test_the_store_of_processes_that_srun_started_on_one_machine_is_on_loopback() -> None:
    with socket.create_server((LOOPBACK, 0)) as free:
        port = free.getsockname()[1]
    store = RankInfo(0, 1, 0, 1, ("a-host-that-nobody-looks-up", port)).store()
    assert (LOOPBACK, port) in listening(psutil.Process()) and {h for h, _ in listening(psutil.Process())} == {LOOPBACK}
    del store
