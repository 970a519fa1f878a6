"""Stack dumps of hung processes, requested by a signal and written even while Python waits in C code.

A process on a GPU also dumps NCCL's flight recorder: the collectives that it started, and which of them ended.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import re
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from stoker.files import no_link, replace_file

SIGNAL = signal.SIGUSR2  # Slurm's users often request SIGUSR1 before the end
RECORDED = 2000  # capacity of the flight recorder
PATIENCE = 2.0  # seconds for a process to write its stack
LOOK_EVERY = 0.5  # seconds
# Code in which a process waits for others: collectives, and the backward pass whose hooks call them.
WAITS = ("torch/distributed/", "torch/autograd/graph.py", "torch/nn/parallel/")
THREAD = re.compile(r"^(Current thread|Thread) 0x", re.MULTILINE)
FRAME = re.compile(r'^  File "(?P<file>.+)", line \d+ in ', re.MULTILINE)


def stack_file(logs: Path, rank: int) -> Path:
    """Returns the file of a process' stacks, in the run's log folder."""
    return logs / f"stack-{rank}.txt"


def collectives_file(logs: Path, rank: int) -> Path:
    """Returns the file of a GPU process' last collectives: a pickle of PyTorch's flight recorder."""
    return logs / f"collectives-{rank}.pickle"


def write_stacks_when_asked(logs: Path, rank: int) -> None:
    """Installs a handler of `SIGNAL` that appends this process' stacks to a file."""
    file = open(stack_file(logs, rank), "a", opener=no_link)  # noqa: SIM115 -- stays open
    faulthandler.register(SIGNAL, file=file, all_threads=True)  # keeps the file open


def record_collectives() -> None:
    """Enables NCCL's recording of collectives; must be called before the first group is created."""
    os.environ.setdefault("TORCH_NCCL_TRACE_BUFFER_SIZE", str(RECORDED))
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(RECORDED))  # name in newer versions


def write_collectives_when_asked(folder: Path, logs: Path, rank: int) -> None:
    """Starts a thread that writes the flight recorder's contents at a request of `ask_for_stacks`.

    Args:
        folder: the run's folder in shared memory.
    """
    threading.Thread(target=_record, args=(folder, logs, rank), daemon=True, name="flight-recorder").start()


@dataclass(frozen=True)
class Stacks:
    """Stacks of the processes.

    Attributes:
        texts: stacks by rank.
        files: written files.
    """

    texts: dict[int, str]
    files: list[Path]


def ask_for_stacks(pids: Mapping[int, int], *, folder: Path, logs: Path, collectives: bool) -> Stacks:
    """Requests the processes' stacks.

    Args:
        pids: process id by rank.
        folder: the run's folder in shared memory.
        collectives: whether they have a flight recorder.
    """
    before = {rank: _size(stack_file(logs, rank)) for rank in pids}
    recorders = [collectives_file(logs, rank) for rank in pids] if collectives else []
    for path in recorders:
        path.unlink(missing_ok=True)
    _request(folder).touch()
    for pid in pids.values():
        with suppress(ProcessLookupError):
            os.kill(pid, SIGNAL)
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        missing = [rank for rank, size in before.items() if _size(stack_file(logs, rank)) == size]
        if not missing and all(path.is_file() for path in recorders):
            break
        time.sleep(0.02)
    time.sleep(0.05)  # for the last lines
    _request(folder).unlink(missing_ok=True)
    texts = {rank: _after(stack_file(logs, rank), size) for rank, size in before.items()}
    files = [stack_file(logs, rank) for rank, text in texts.items() if text]
    return Stacks(texts, files + [path for path in recorders if path.is_file()])


def waits_for_others(stack: str) -> bool:
    """Returns whether the main thread, which faulthandler writes last, is in a collective."""
    main = THREAD.split(stack)[-1]
    innermost = FRAME.search(main)
    return innermost is not None and any(place in innermost["file"] for place in WAITS)


def _request(folder: Path) -> Path:
    return folder / "collectives-wanted"


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _after(path: Path, size: int) -> str:
    return path.read_bytes()[size:].decode(errors="replace") if path.is_file() else ""


def _record(folder: Path, logs: Path, rank: int) -> None:
    recorder = importlib.import_module("torch._C._distributed_c10d")  # exists only in PyTorch with NCCL
    while True:
        time.sleep(LOOK_EVERY)
        if _request(folder).exists():
            replace_file(collectives_file(logs, rank), recorder._dump_nccl_trace())
            while _request(folder).exists():
                time.sleep(LOOK_EVERY)
