"""Fault injection: each fault happens once, at a stated step, in the run's real processes.

The run's folder says which (``chaos/faults.json``) and keeps which of them have happened (``chaos/happened-3``),
so that a process that is started again does not meet a fault twice. Without that file nothing is looked for.
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
from stoker.runs.shm_folder import CUT, SUPERVISOR, shared_folder, this_node

Kind = Literal["kill", "hang", "slow", "nan", "corrupt", "fill-disk", "kill-node", "cut-link"]
OF_NODES: tuple[Kind, ...] = ("kill-node", "cut-link")
KINDS: tuple[Kind, ...] = get_args(Kind)
FOR_EVER = 1e6  # seconds
SLOW_STEPS = 2 * WINDOW  # that a slow process stays so: long enough to have a whole window in them
FLIPPED = 64  # bytes in the middle of a file that a damaged disk gives back otherwise
FULL_AT = 4096  # bytes that a file may have on a disk that is "full": the least that no tensor file stays below
SETTLE = 2.0  # seconds that a checkpoint gets that is being written
POLL = 0.02  # seconds; a writer takes longer than that to start


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        kind: ``kill`` the process dies at once; ``hang`` it stops; ``slow`` it takes ``factor`` times as
            long for some steps; ``nan`` its loss and gradient are not finite; ``corrupt`` the newest checkpoint's
            bytes change on the disk, what is in memory is lost, and the process dies; ``fill-disk`` what the
            process writes next of a checkpoint does not fit; ``kill-node`` the supervisor of ``node`` is killed, and
            all of its processes with it; ``cut-link`` its connections to other nodes end, those of its processes too,
            and for ``seconds`` its supervisor takes and makes none.
        step: before whose passes it happens; after them, for ``nan``.
        rank: of the process.
        factor: of ``slow``.
        node: name of the node.
        seconds: of ``cut-link``.
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
    """The faults registered for a run."""
    path = folder.chaos / "faults.json"
    try:
        return [Fault(**values) for values in json.loads(path.read_text(encoding="utf-8"))] if path.is_file() else []
    except (TypeError, ValueError) as error:
        raise UserError(f"{path} is no list of faults ({error})") from error


class Chaos:
    """The faults of this process, as a hook of the loop (`stoker.train.hooks.Hook`).

    Args:
        checkpoints: the folder of the run's checkpoints.
        parameters: those that the optimizer steps.
    """

    def __init__(
        self, folder: RunFolder, rank: int, checkpoints: Path, parameters: Sequence[nn.Parameter] = ()
    ) -> None:
        self._folder, self._rank, self._checkpoints, self._parameters = folder, rank, checkpoints, parameters
        node = this_node()
        self._mine = [
            (n, fault)
            for n, fault in enumerate(read_faults(folder))
            if (fault.node == node if fault.kind in OF_NODES else fault.rank == rank)
        ]
        self._of_node = os.environ.get("LOCAL_RANK", "0")  # each process of a node meets what befalls the node
        self._began: float | None = None
        self._seconds: list[float] = []  # of the steps so far
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
        """Applies the step's faults, except those of its numbers."""
        if not self._mine:
            return
        for number, fault in self._due(step):
            if fault.kind != "nan":
                self._happens(number, fault)
                self._acts[fault.kind](fault)
        self._pause(step)

    def after_passes(self, step: int, loss: Tensor) -> Tensor:
        """Applies ``nan`` faults to the loss and the gradients."""
        for number, fault in self._due(step):
            if fault.kind == "nan":
                self._happens(number, fault)
                for parameter in self._parameters:
                    if parameter.grad is not None:
                        parameter.grad.mul_(torch.nan)
                return loss * torch.nan
        return loss

    def _due(self, step: int) -> list[tuple[int, Fault]]:
        return [(n, fault) for n, fault in self._mine if fault.step == step and not self._mark(n, fault).exists()]

    def _mark(self, number: int, fault: Fault) -> Path:
        other = f"-{self._of_node}" if fault.kind in OF_NODES and self._of_node != "0" else ""
        return self._folder.chaos / f"happened-{number}{other}"

    def _happens(self, number: int, fault: Fault) -> None:
        with open(self._mark(number, fault), "ab", opener=no_link):
            pass
        if fault.kind in OF_NODES:
            if self._of_node == "0":
                self._folder.event("chaos", number=number, kind=fault.kind, node=fault.node, step=fault.step)
            return
        self._folder.event("chaos", number=number, kind=fault.kind, rank=fault.rank, step=fault.step)

    def _kill(self, _: Fault) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _kill_node(self, _: Fault) -> None:
        if self._of_node == "0":
            os.kill(int((shared_folder(self._folder.path) / SUPERVISOR).read_text()), signal.SIGKILL)
        time.sleep(FOR_EVER)  # this process ends with its supervisor

    def _cut_link(self, fault: Fault) -> None:
        if self._of_node == "0":
            replace_file(shared_folder(self._folder.path) / CUT, str(fault.seconds))
        shut_down_connections()

    def _begin_slow(self, fault: Fault) -> None:
        usual = median(self._seconds[1:] or [0.1])  # the first step has work of its own
        self._slow = fault.step + SLOW_STEPS, usual * (fault.factor - 1)

    def _pause(self, step: int) -> None:
        now = time.monotonic()
        if self._slow is not None and step < self._slow[0]:
            time.sleep(self._slow[1])
        elif self._began is not None:
            self._seconds.append(now - self._began)
        self._began = time.monotonic()

    def _corrupt(self, fault: Fault) -> None:
        """What is left after a node has gone with its memory, and its disk gives back other bytes."""
        storage = LocalStorage(self._checkpoints)
        deadline = time.monotonic() + SETTLE
        # What is being written would be the newest in a moment.
        while time.monotonic() < deadline and max(storage.pending(), default=0) > max(storage.steps(), default=0):
            time.sleep(POLL)
        *others, newest = [0, *storage.steps()]
        if others[1:]:  # no run survives the loss of its only checkpoint
            flip(max(storage.path(newest).iterdir(), key=lambda path: path.lstat().st_size))
        forget_copies(copies_in(shared_folder(self._folder.path)))
        self._kill(fault)

    def _fill(self, _: Fault) -> None:
        """Limits the size of files for the processes that write for this one: the error is the system's own."""
        events = len(self._folder.read_events())
        _limit(psutil.Process().children(recursive=True), FULL_AT)  # before the next step, which may take an instant
        threading.Thread(target=self._be_full, args=(events,), daemon=True, name="full-disk").start()

    def _be_full(self, events: int) -> None:
        """Lasts until the full disk has been noticed; then it has room again."""
        this = psutil.Process()
        while not any(event["event"] == "save_failed" for event in self._folder.read_events()[events:]):
            _limit(this.children(recursive=True), FULL_AT)  # a writer may be started at any time
            time.sleep(POLL)
        _limit(this.children(recursive=True), resource.RLIM_INFINITY)


def shut_down_connections() -> None:
    """Ends all TCP connections of this process, at both ends."""
    for name in Path("/proc/self/fd").iterdir():
        with suppress(OSError), socket.socket(fileno=os.dup(int(name.name))) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                connection.shutdown(socket.SHUT_RDWR)


def flip(path: Path) -> None:
    """Changes some bytes in the middle of a file; its size stays."""
    with open(path, "r+b", opener=no_link) as file:
        file.seek(path.stat().st_size // 2)
        old = file.read(FLIPPED)
        file.seek(-len(old), os.SEEK_CUR)
        file.write(bytes(byte ^ 0xFF for byte in old))


def _limit(processes: Sequence[psutil.Process], size: int) -> None:
    """Bytes that a file of these processes may have."""
    for process in processes:
        with suppress(ProcessLookupError):
            _, most = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, most))
