"""Heartbeats: each process writes its phase and step into shared memory, where the supervisor reads them.

Eight bytes are written atomically, so a reader sees the old number or the new one; no lock, no message, no system call.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

# In the order of a process' life; those of a step are in `STEP`.
PHASES = ("start", "prepare", "restore", "rollouts", "data", "train", "optimizer", "evaluate", "save", "end")
STEP = ("data", "train", "optimizer")
LONG = ("rollouts", "evaluate", "save")  # phases between steps, of which the longest duration is recorded
RUN_DELAY = Path("/proc/thread-self/schedstat")  # nanoseconds on a processor and waiting for one, and time slices

Clock = Callable[[], float]


class Pulse(NamedTuple):
    """A process' phase and step at its last heartbeat. A leader makes eight hundred a second of a thousand nodes.

    Attributes:
        beat: time of the last heartbeat, seconds of the machine's monotonic clock.
        phase: phase that began then; see `PHASES`.
        step: step of the phase; during `evaluate` and `save` the last finished one.
        done: the last finished step; -1 before the process has restored its state.
        steps: number of steps that this process has finished.
        own: seconds of its own work in them, without waiting for other processes.
        slowest: duration of the slowest step, seconds.
        evaluate, save, rollouts: duration of the longest evaluation, save and sampling of answers, seconds; 0 before
            the first.
    """

    beat: float
    phase: str
    step: int
    done: int
    steps: int
    own: float
    slowest: float
    evaluate: float
    save: float
    rollouts: float = 0.0


CELLS = struct.Struct(f"{len(Pulse._fields)}d")  # the fields of a `Pulse`, with the index of the phase


def heart_file(folder: Path, rank: int) -> Path:
    """Returns a process' heartbeat file, in the run's shared-memory folder."""
    return folder / f"heart-{rank}"


class Listener:
    """Reads the heartbeats of one start of the processes; works after their files have been removed.

    Args:
        folder: the run's folder in shared memory.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[int, IO[bytes]] = {}

    def pulse(self, rank: int) -> Pulse | None:
        """Returns the newest heartbeat; None before the first."""
        with suppress(OSError, struct.error):
            if rank not in self._files:
                self._files[rank] = heart_file(self._folder, rank).open("rb", buffering=0)
            return _pulse(os.pread(self._files[rank].fileno(), CELLS.size, 0))
        return None

    def close(self) -> None:
        """Stops reading."""
        while self._files:
            self._files.popitem()[1].close()


class Heart:
    """Writes this process' heartbeat.

    Args:
        folder: the run's folder in shared memory; None for an unwatched process.
        device_seconds: returns the seconds that the device spent on this process' work since the last call, for devices
            whose work does not show in processor time.

    Attributes:
        watched: whether a supervisor reads the heartbeat and reports to the user.
    """

    def __init__(self, folder: Path | None = None, rank: int = 0, *, device_seconds: Clock | None = None) -> None:
        self._device_seconds = device_seconds
        self.watched = folder is not None
        memory = _mapped(heart_file(folder, rank)) if folder is not None else bytearray(CELLS.size)
        self._cells = memoryview(memory).cast("d")
        self._phase, self._step = "start", 0
        self._wall = self._busy = self._step_began = 0.0
        self._own = 0.0  # in the current step
        self._set("done", -1)
        self.beat("start")

    @property
    def pulse(self) -> Pulse | None:
        """This process' newest heartbeat."""
        return _pulse(self._cells.tobytes())

    def beat(self, phase: str, step: int = 0) -> None:
        """Records the start of a phase of step ``step``."""
        now, busy = time.monotonic(), _busy()
        if self._phase == "data":  # reading samples does not wait for other processes
            self._own += now - self._wall
        elif self._phase in STEP:
            self._own += self._device_seconds() if self._device_seconds else busy - self._busy
        self._ended(now, phase)
        self._phase, self._step, self._wall, self._busy = phase, step, now, busy
        self._set("step", step)
        self._set("phase", PHASES.index(phase))
        self._set("beat", now)

    def restored(self, step: int) -> None:
        """Records that the state of a step was restored; 0 at the start of a run."""
        self._set("done", step)

    def _ended(self, now: float, phase: str) -> None:
        """Records the phase that ends now."""
        if self._phase in LONG:
            self._set(self._phase, max(self._get(self._phase), now - self._wall))
        if self._phase == "optimizer":
            self._set("slowest", max(self._get("slowest"), now - self._step_began))
            self._set("own", self._get("own") + self._own)
            self._set("steps", self._get("steps") + 1)
            self._set("done", self._step)
            self._own = 0.0
        if phase == "data":
            self._step_began = now

    def _set(self, field: str, value: float) -> None:
        self._cells[Pulse._fields.index(field)] = value

    def _get(self, field: str) -> float:
        return self._cells[Pulse._fields.index(field)]


def _pulse(cells: bytes) -> Pulse | None:
    beat, phase, step, done, steps, *seconds = CELLS.unpack(cells)
    return Pulse(beat, PHASES[int(phase)], int(step), int(done), int(steps), *seconds) if beat else None


def _mapped(path: Path) -> mmap.mmap:
    path.write_bytes(bytes(CELLS.size))
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), CELLS.size)


def _busy() -> float:
    """Returns the seconds that this thread computed or was runnable; time spent waiting for others is excluded."""
    try:
        on, waiting, _ = RUN_DELAY.read_bytes().split()
    except (OSError, ValueError):  # no Linux
        return time.thread_time()
    return (int(on) + int(waiting)) / 1e9
