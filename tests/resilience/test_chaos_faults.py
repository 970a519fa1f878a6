"""Faults on purpose happen where they are to, in the process they are meant for, and once."""

from __future__ import annotations

import math
import multiprocessing
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.checkpoint.dcp_store import Store
from stoker.checkpoint.state import DamagedError, State
from stoker.resilience import fault_injection
from stoker.resilience.fault_injection import SLOW_STEPS, Chaos, Fault, corrupt_file, read_faults, write_faults
from stoker.runs.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    with folder.take():
        return folder


def chaos_of(folder: RunFolder, *faults: Fault, rank: int = 0) -> Chaos:
    if faults:
        write_faults(folder, faults)
    return Chaos(folder, rank, folder.checkpoints)


def happened(folder: RunFolder) -> list[tuple[str, int, int]]:
    return [(e["kind"], e["rank"], e["step"]) for e in folder.read_events() if e["event"] == "chaos"]


def test_faults_are_read_back(folder: RunFolder) -> None:
    faults = [Fault("kill", 7, 1), Fault("slow", 9, 0, 2.5)]
    write_faults(folder, faults)
    assert read_faults(folder) == faults and [str(f) for f in faults] == ["kill 1@7", "slow 0@9:2.5"]


def test_without_any_nothing_happens(folder: RunFolder) -> None:
    chaos, before = chaos_of(folder), sorted(folder.path.iterdir())
    chaos.before_passes(1)
    loss = torch.tensor(2.0)
    assert chaos.after_passes(1, loss) is loss and sorted(folder.path.iterdir()) == before


def test_a_loss_is_spoilt_once_and_on_its_rank_only(folder: RunFolder) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    write_faults(folder, [Fault("nan", 4, 1)])

    def spoilt(rank: int, number: int) -> torch.Tensor:
        return Chaos(folder, rank, folder.checkpoints, [parameter]).after_passes(number, torch.tensor(2.0))

    for rank, number in ((0, 4), (1, 3), (1, 5)):
        assert spoilt(rank, number) == 2.0
    assert spoilt(1, 4).isnan()
    assert parameter.grad.isnan().all() and happened(folder) == [("nan", 1, 4)]
    assert spoilt(1, 4) == 2.0  # as when it has been restarted


def _train(path: str, last: int) -> None:
    chaos = Chaos(RunFolder(Path(path)), 0, Path(path) / "checkpoints")
    for number in range(1, last + 1):
        chaos.before_passes(number)


@pytest.mark.slow
def test_a_process_is_killed_once(folder: RunFolder) -> None:
    write_faults(folder, [Fault("kill", 2)])
    context = multiprocessing.get_context("spawn")
    codes = []
    for _ in range(2):
        process = context.Process(target=_train, args=(str(folder.path), 3))
        process.start()
        process.join(60)
        codes.append(process.exitcode)
    assert codes == [-signal.SIGKILL, 0] and happened(folder) == [("kill", 0, 2)]


def test_a_process_hangs(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    chaos = chaos_of(folder, Fault("hang", 2))
    monkeypatch.setattr(time, "sleep", slept.append)
    chaos.before_passes(1)
    assert not slept
    chaos.before_passes(2)
    assert slept == [1e6]


def test_a_slow_process_takes_three_times_as_long_for_some_steps(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    chaos = chaos_of(folder, Fault("slow", 5, 0, 3.0))
    now, slept = 0.0, []

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        slept.append(seconds)

    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(time, "sleep", sleep)
    for number in range(1, 5 + SLOW_STEPS + 3):
        chaos.before_passes(number)
        now += 0.01  # of work
    assert slept == [pytest.approx(0.02)] * SLOW_STEPS


def save(store: Store, step_number: int) -> None:
    store.save(State(step_number, {"model/w": torch.arange(1000.0)}, {}))


def test_a_checkpoint_is_damaged_so_that_it_is_noticed(folder: RunFolder) -> None:
    store = Store(folder.checkpoints)
    save(store, 3)
    corrupt_file(max(store.storage.path(3).iterdir(), key=lambda path: path.stat().st_size))
    with pytest.raises(DamagedError):
        store.load(3)


@pytest.mark.slow
def test_the_newest_checkpoint_is_damaged_as_soon_as_there_is_another(folder: RunFolder) -> None:
    """No run survives the loss of its only checkpoint, and a rehearsal that damages none shows nothing."""
    store = Store(folder.checkpoints)
    write_faults(folder, [Fault("corrupt", 2)])
    codes = []
    for number in (3, 6):
        save(store, number)
        process = multiprocessing.get_context("spawn").Process(target=_train, args=(str(folder.path), 3))
        process.start()
        process.join(60)
        codes.append(process.exitcode)
    assert codes == [0, -signal.SIGKILL] and happened(folder) == [("corrupt", 0, 2)]
    assert torch.equal(store.load(3).tensors["model/w"], torch.arange(1000.0))  # type: ignore[arg-type]
    with pytest.raises(DamagedError):
        store.load(6)


def test_a_damaged_checkpoint_is_due_until_it_has_happened(folder: RunFolder) -> None:
    store, chaos = Store(folder.checkpoints), chaos_of(folder, Fault("corrupt", 4))
    save(store, 3)
    assert not chaos._due(4) and not chaos._due(5)
    save(store, 6)
    assert not chaos._due(3) and [fault.step for _, fault in chaos._due(7)] == [4]


WRITER = """
import errno, sys
for line in sys.stdin:
    try:
        with open(line.strip(), "wb", buffering=0) as file:
            for _ in range(100):
                file.write(bytes(1000))
        print("written", flush=True)
    except OSError as error:
        print(errno.errorcode[error.errno], flush=True)
"""


def test_who_writes_for_a_process_finds_the_disk_full_until_it_has_been_noticed(folder: RunFolder) -> None:
    chaos = chaos_of(folder, Fault("fill-disk", 1))
    chaos.before_passes(1)
    writer: Any = subprocess.Popen(
        [sys.executable, "-c", WRITER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    with writer:

        def write() -> str:
            writer.stdin.write(f"{folder.path / 'file'}\n")
            return writer.stdout.readline().strip()

        deadline = time.monotonic() + 30
        while (said := write()) == "written" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert said == "EFBIG" and (folder.path / "file").stat().st_size == 4096
        (folder.path / "own").write_bytes(bytes(10_000))  # the process itself goes on
        folder.event("save_failed", step=1)
        while write() != "written":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        writer.stdin.close()
    assert math.isclose((folder.path / "file").stat().st_size, 100_000)


def test_a_fault_of_a_node_is_met_there_by_every_process(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    write_faults(folder, [Fault("cut-link", 2, node="1", seconds=2.0)])
    for node, rank, met in (("1", 0, True), ("1", 3, True), ("0", 0, False)):
        monkeypatch.setattr(fault_injection, "node_name", lambda node=node: node)
        assert bool(Chaos(folder, rank, folder.checkpoints)._due(2)) is met
