"""The queue of jobs for this machine's devices, waiting and training: each is a folder below ``queue/``.

One process for each page's folder of state starts them in order, as GPUs become free:
`python -m stoker.page.processes.job_queue STATE`. It is separate from the page and ends when the queue is empty; the
page restarts it with the next job.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from stoker.files import read_file, replace_file
from stoker.hardware.process.program_output import program_output
from stoker.page.page_error import http_error
from stoker.page.processes.detached_process import DetachedProcess, spawn

POLL = 0.25  # seconds
PATIENCE = 5.0  # seconds that a second starter waits for the first to end
STARTER_LOCK = ".starter"
ENTRY_LOCK = ".number"
DEVICES = "devices.json"
VISIBLE = "CUDA_VISIBLE_DEVICES"
ALIVE = ("waiting", "starting", "running")


@dataclass(frozen=True)
class QueuedJob:
    """A job that was started through the page.

    Attributes:
        number: its place in the order of starting.
        run: the folder of its run, or of the runs of its stages.
        job: the job file.
        command: the line that does the same.
        user: who started it.
        time: when, seconds since 1970.
        devices: how many GPUs it trains on; 0 for all there are.
    """

    number: int
    name: str
    run: str
    job: str
    command: str
    user: str
    time: float
    devices: int = 0


class JobQueue:
    """The jobs of a folder."""

    def __init__(self, state: Path) -> None:
        self._state, self._folder = state, state / "queue"

    def add(
        self,
        arguments: list[str],
        *,
        cwd: Path,
        run: Path,
        job: Path,
        command: str,
        user: str,
        name: str,
        devices: int = 0,
    ) -> QueuedJob:
        """Puts a job at the end of the queue; see `QueuedJob` for the arguments.

        Raises:
            PageError: a job of this run, or of the run that it is a stage of, waits or trains.
        """
        with FileLock(self._folder / ENTRY_LOCK, timeout=10):
            entries = self.entries()
            if any(run.is_relative_to(entry.run) and process.state in ALIVE for entry, process in entries):
                hint = "give another name, or wait"
                raise http_error(409, "a job is training in {run}, or waits to", hint, run=run.name)
            number = max((entry.number for entry, _ in entries), default=0) + 1
            entry = QueuedJob(
                number=number,
                name=name,
                run=str(run),
                job=str(job),
                command=command,
                user=user,
                time=round(time.time(), 3),
                devices=devices,
            )
            process = DetachedProcess(self._place(number))
            process.prepare(arguments, cwd=cwd)
            replace_file(process.folder / "entry.json", json.dumps(asdict(entry)))
        self.start_starter()
        return entry

    def entries(self) -> list[tuple[QueuedJob, DetachedProcess]]:
        """Returns all jobs, the oldest first, without removed ones."""
        found = []
        for place in sorted(self._folder.glob("[0-9]*")):
            with suppress(OSError, ValueError, TypeError):
                found.append((QueuedJob(**json.loads(read_file(place / "entry.json"))), DetachedProcess(place)))
        return found

    def of_run(self, run: Path) -> tuple[QueuedJob, DetachedProcess] | None:
        """Returns the newest job of a run's folder."""
        return next(((e, p) for e, p in reversed(self.entries()) if e.run == str(run)), None)

    def cancel(self, number: int, *, ended: bool = False) -> bool:
        """Removes a waiting job, or with ``ended`` also one that has ended; returns whether it did."""
        with FileLock(self._folder / ENTRY_LOCK, timeout=10):
            place = self._place(number)
            if not place.is_dir() or not is_cancellable(DetachedProcess(place), ended=ended):
                return False
            place.rename(place.with_name(f"cancelled-{place.name}-{time.time_ns()}"))
            return True

    def stop(self, number: int) -> bool:
        """Removes a waiting job, or asks its process to end; returns whether it did either."""
        process, until = DetachedProcess(self._place(number)), time.monotonic() + PATIENCE
        while (state := process.state) in ALIVE and time.monotonic() < until:
            if self.cancel(number) if state == "waiting" else process.stop():
                return True
            time.sleep(POLL / 5)  # it is starting, and its process id is not known yet
        return False

    def start_starter(self) -> None:
        """Ensures that a process runs which starts the waiting jobs."""
        spawn(["-m", "stoker.page.processes.job_queue", str(self._state)])

    def has_starter(self) -> bool:
        """Returns whether the starter process is alive."""
        try:
            with FileLock(self._folder / STARTER_LOCK, timeout=0):
                return False
        except Timeout:
            return True

    def run_starter(self, gpus: Sequence[str] = ()) -> None:
        """Starts jobs until none is left.

        Args:
            gpus: those that jobs may have, as CUDA_VISIBLE_DEVICES names them; without any, one job at a time.
        """
        try:
            with FileLock(self._folder / STARTER_LOCK, timeout=PATIENCE):
                while self._start_next(gpus):
                    time.sleep(POLL)
        except Timeout:  # another one does
            return

    def _start_next(self, gpus: Sequence[str]) -> bool:
        """Starts the jobs whose devices are free, none before an earlier one; returns whether any waits or runs."""
        with FileLock(self._folder / ENTRY_LOCK, timeout=10):
            entries = [(entry, process, process.state) for entry, process in self.entries()]
            running = [process for _, process, state in entries if state in ("starting", "running")]
            taken = {name for process in running for name in devices_of(process)}
            free = [name for name in gpus if name not in taken]
            for entry, process, state in entries:
                if state != "waiting":
                    continue
                wanted = min(entry.devices or len(gpus), len(gpus))
                if running and (not gpus or wanted > len(free)):
                    return True
                own, free = free[:wanted], free[wanted:]
                replace_file(process.folder / DEVICES, json.dumps(own))
                process.start({VISIBLE: ",".join(own)} if gpus else None)
                running.append(process)
            return bool(running)

    def _place(self, number: int) -> Path:
        return self._folder / f"{number:06d}"


def is_cancellable(process: DetachedProcess, *, ended: bool) -> bool:
    """Returns whether a job can be removed: one that waits, or with ``ended`` also one that has ended."""
    return process.state in (("waiting", "ended", "lost") if ended else ("waiting",))


def devices_of(process: DetachedProcess) -> list[str]:
    """Returns the GPUs that a job was given."""
    try:
        return [str(name) for name in json.loads(read_file(process.folder / DEVICES))]
    except (OSError, ValueError, TypeError):
        return []


def visible_gpus() -> list[str]:
    """Returns this machine's GPUs listed by `nvidia-smi` and CUDA_VISIBLE_DEVICES; none without `nvidia-smi`."""
    listed = (program_output("nvidia-smi", "-L", seconds=30.0) or "").splitlines()
    names = [str(number) for number, line in enumerate(listed) if line.startswith("GPU ")]
    given = os.environ.get(VISIBLE)
    return names if given is None else [name.strip() for name in given.split(",") if name.strip()][: len(names)]


if __name__ == "__main__":
    JobQueue(Path(sys.argv[1])).run_starter(visible_gpus())
