"""Fault injection: each fault occurs once, at a given step, in the run's real processes.

The run's folder lists the faults (``chaos/faults.json``) and records those that have occurred (``chaos/happened-3``),
so that a restarted process does not meet a fault again. Without that file nothing is injected.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Literal, get_args

import psutil
import torch
from torch import Tensor, nn

from stoker.checkpoint.shm_buffers import copies_in, forget_copies
from stoker.checkpoint.storage import LocalStorage
from stoker.errors import UserError
from stoker.files import no_link, replace_file
from stoker.resilience.watchdog import WINDOW
from stoker.runs.run_folder import RunFolder
from stoker.runs.shm_folder import CUT, SUPERVISOR, node_name, shared_folder

Kind = Literal["kill", "hang", "slow", "nan", "corrupt", "fill-disk", "kill-node", "cut-link"]
OF_NODES: tuple[Kind, ...] = ("kill-node", "cut-link")
KINDS: tuple[Kind, ...] = get_args(Kind)
FOR_EVER = 1e6  # seconds
SLOW_STEPS = 2 * WINDOW  # duration of a slow fault: covers at least one whole window
FLIPPED = 64  # bytes in the middle of a file that a damaged disk corrupts
FULL_AT = 4096  # most bytes of a file on a "full" disk: smaller than every tensor file
SETTLE = 2.0  # seconds for a pending checkpoint to finish
POLL = 0.02  # seconds; starting a writer takes longer


@dataclass(frozen=True)
class Fault:
    """An injected fault.

    Attributes:
        kind: ``kill``: the process dies at once. ``hang``: it stops. ``slow``: it takes ``factor`` times as long for
            some steps. ``nan``: its loss and gradient are not finite. ``corrupt``: bytes of the newest checkpoint
            change on disk, in-memory copies are lost, and the process dies; it waits until there are two checkpoints,
            as no run survives the loss of its only one. ``fill-disk``: the process' next write of a
            checkpoint does not fit. ``kill-node``: the supervisor of ``node`` is killed with all of its processes.
            ``cut-link``: connections of the node's supervisor and processes to other nodes end, and for ``seconds`` its
            supervisor makes and accepts none.
        step: the fault occurs before its passes; after them for ``nan``.
        rank: rank of the process.
        factor: slowdown of ``slow``.
        node: name of the node.
        seconds: duration of ``cut-link``.
    """

    kind: Kind
    step: int
    rank: int = 0
    factor: float = 1.0
    node: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        if self.node:
            return f"{self.kind} {self.node}@{self.step}" + (f":{self.seconds:g}" if self.seconds else "")
        where = f"{self.kind} {self.rank}@{self.step}"
        return f"{where}:{self.factor:g}" if self.kind == "slow" else where


def write_faults(folder: RunFolder, faults: Sequence[Fault]) -> None:
    """Registers faults for the run in a folder."""
    with folder.take():
        folder.chaos.mkdir()
        (folder.chaos / "faults.json").write_text(json.dumps([asdict(fault) for fault in faults]), encoding="utf-8")


def read_faults(folder: RunFolder) -> list[Fault]:
    """Reads the faults registered for a run."""
    path = folder.chaos / "faults.json"
    try:
        return [Fault(**values) for values in json.loads(path.read_text(encoding="utf-8"))] if path.is_file() else []
    except (TypeError, ValueError) as error:
        raise UserError(f"{path} is not a list of faults ({error})") from error


class Chaos:
    """The faults of this process, as a hook of the loop (`stoker.train.hooks.Hook`).

    Args:
        checkpoints: folder of the run's checkpoints.
        parameters: parameters that the optimizer steps.
    """

    def __init__(
        self, folder: RunFolder, rank: int, checkpoints: Path, parameters: Sequence[nn.Parameter] = ()
    ) -> None:
        self._folder, self._rank, self._checkpoints, self._parameters = folder, rank, checkpoints, parameters
        node = node_name()
        self._mine = [
            (n, fault)
            for n, fault in enumerate(read_faults(folder))
            if (fault.node == node if fault.kind in OF_NODES else fault.rank == rank)
        ]
        self._of_node = os.environ.get("LOCAL_RANK", "0")  # each process of a node meets the node's faults
        self._began: float | None = None
        self._seconds: list[float] = []  # durations of the steps so far
        self._slow: tuple[int, float] | None = None  # last step, seconds
        self._acts: dict[Kind, Callable[[Fault], None]] = {
            "kill": self._kill,
            "hang": lambda _: time.sleep(FOR_EVER),
            "slow": self._begin_slow,
            "corrupt": self._corrupt,
            "fill-disk": self._fill,
            "kill-node": self._kill_node,
            "cut-link": self._cut_link,
        }

    def before_passes(self, step: int) -> None:
        """Applies the step's faults, except ``nan``."""
        if not self._mine:
            return
        for number, fault in self._due(step):
            if fault.kind != "nan":
                self._happens(number, fault, step)
                self._acts[fault.kind](fault)
        self._pause(step)

    def after_passes(self, step: int, loss: Tensor) -> Tensor:
        """Applies ``nan`` faults to the loss and the gradients."""
        for number, fault in self._due(step):
            if fault.kind == "nan":
                self._happens(number, fault, step)
                for parameter in self._parameters:
                    if parameter.grad is not None:
                        parameter.grad.mul_(torch.nan)
                return loss * torch.nan
        return loss

    def _due(self, step: int) -> list[tuple[int, Fault]]:
        return [
            (n, fault)
            for n, fault in self._mine
            if (fault.step == step or (fault.kind == "corrupt" and fault.step < step))
            and not self._mark(n, fault).exists()
            and (fault.kind != "corrupt" or self._has_two_checkpoints())
        ]

    def _mark(self, number: int, fault: Fault) -> Path:
        other = f"-{self._of_node}" if fault.kind in OF_NODES and self._of_node != "0" else ""
        return self._folder.chaos / f"happened-{number}{other}"

    def _happens(self, number: int, fault: Fault, step: int) -> None:
        with open(self._mark(number, fault), "ab", opener=no_link):
            pass
        if fault.kind in OF_NODES:
            if self._of_node == "0":
                self._folder.event("chaos", number=number, kind=fault.kind, node=fault.node, step=step)
            return
        self._folder.event("chaos", number=number, kind=fault.kind, rank=fault.rank, step=step)

    def _kill(self, _: Fault) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _kill_node(self, _: Fault) -> None:
        if self._of_node == "0":
            os.kill(int((shared_folder(self._folder.path) / SUPERVISOR).read_text()), signal.SIGKILL)
        time.sleep(FOR_EVER)  # the supervisor's end also ends this process

    def _cut_link(self, fault: Fault) -> None:
        if self._of_node == "0":
            replace_file(shared_folder(self._folder.path) / CUT, str(fault.seconds))
        shut_down_connections()

    def _begin_slow(self, fault: Fault) -> None:
        usual = median(self._seconds[1:] or [0.1])  # the first step has extra work
        self._slow = fault.step + SLOW_STEPS, usual * (fault.factor - 1)

    def _pause(self, step: int) -> None:
        now = time.monotonic()
        if self._slow is not None and step < self._slow[0]:
            time.sleep(self._slow[1])
        elif self._began is not None:
            self._seconds.append(now - self._began)
        self._began = time.monotonic()

    def _has_two_checkpoints(self) -> bool:
        """Returns whether there are two, after a pending one, which would soon be the newest."""
        storage = LocalStorage(self._checkpoints)
        deadline = time.monotonic() + SETTLE
        while time.monotonic() < deadline and max(storage.pending(), default=0) > max(storage.steps(), default=0):
            time.sleep(POLL)
        return len(storage.steps()) > 1

    def _corrupt(self, fault: Fault) -> None:
        """Simulates the loss of a node's memory together with a corrupted checkpoint on disk."""
        storage = LocalStorage(self._checkpoints)
        newest = max(storage.steps())
        corrupt_file(max(storage.path(newest).iterdir(), key=lambda path: path.lstat().st_size))
        forget_copies(copies_in(shared_folder(self._folder.path)))
        self._kill(fault)

    def _fill(self, _: Fault) -> None:
        """Limits the file size of this process' writers, so that the error is a real one of the system."""
        events = len(self._folder.read_events())
        _limit(psutil.Process().children(recursive=True), FULL_AT)  # before the next step, which may be very short
        threading.Thread(target=self._be_full, args=(events,), daemon=True, name="full-disk").start()

    def _be_full(self, events: int) -> None:
        """Keeps the limit until the full disk has been noticed, then removes it."""
        this = psutil.Process()
        while not any(event["event"] == "save_failed" for event in self._folder.read_events()[events:]):
            _limit(this.children(recursive=True), FULL_AT)  # a writer may be started at any time
            time.sleep(POLL)
        _limit(this.children(recursive=True), resource.RLIM_INFINITY)


def shut_down_connections() -> None:
    """Shuts down all TCP connections of this process, at both ends."""
    for name in Path("/proc/self/fd").iterdir():
        with suppress(OSError), socket.socket(fileno=os.dup(int(name.name))) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                connection.shutdown(socket.SHUT_RDWR)


def corrupt_file(path: Path) -> None:
    """Flips some bytes in the middle of a file; its size stays."""
    with open(path, "r+b", opener=no_link) as file:
        file.seek(path.stat().st_size // 2)
        old = file.read(FLIPPED)
        file.seek(-len(old), os.SEEK_CUR)
        file.write(bytes(byte ^ 0xFF for byte in old))


def _limit(processes: Sequence[psutil.Process], size: int) -> None:
    """Limits the file size of processes, in bytes."""
    for process in processes:
        with suppress(ProcessLookupError):
            _, most = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, most))
