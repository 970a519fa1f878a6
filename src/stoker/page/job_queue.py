"""Jobs that wait for this machine's devices, and those that train: each is a folder below ``queue/``.

One process for each page's folder of state starts them, the oldest first: `python -m stoker.page.job_queue STATE`. It
is no part of the page and ends when nothing is left to do; the page starts it again with the next job.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from stoker.files import read_file, replace_file
from stoker.page.detached import Detached, spawn

POLL = 0.25  # seconds
PATIENCE = 5.0  # seconds that a second starter waits for the first to end
STARTER_LOCK = ".starter"
ENTRY_LOCK = ".number"


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
    """

    number: int
    name: str
    run: str
    job: str
    command: str
    user: str
    time: float


class JobQueue:
    """The jobs of a folder."""

    def __init__(self, state: Path) -> None:
        self._state, self._folder = state, state / "queue"

    def add(self, arguments: list[str], *, cwd: Path, run: Path, job: Path, command: str, **of_user: str) -> QueuedJob:
        """Puts a job at the end of the queue.

        Args:
            of_user: ``user`` and ``name``.
        """
        with FileLock(self._folder / ENTRY_LOCK, timeout=10):
            number = max((entry.number for entry, _ in self.entries()), default=0) + 1
            entry = QueuedJob(
                number, of_user["name"], str(run), str(job), command, of_user["user"], round(time.time(), 3)
            )
            process = Detached(self._place(number))
            process.prepare(arguments, cwd=cwd)
            replace_file(process.folder / "entry.json", json.dumps(asdict(entry)))
        self.start_starter()
        return entry

    def entries(self) -> list[tuple[QueuedJob, Detached]]:
        """All jobs, the oldest first; those that were taken out are not among them."""
        found = []
        for place in sorted(self._folder.glob("[0-9]*")):
            with suppress(OSError, ValueError, TypeError):
                found.append((QueuedJob(**json.loads(read_file(place / "entry.json"))), Detached(place)))
        return found

    def of_run(self, run: Path) -> tuple[QueuedJob, Detached] | None:
        """The newest job of a run's folder."""
        return next(((e, p) for e, p in reversed(self.entries()) if e.run == str(run)), None)

    def cancel(self, number: int) -> bool:
        """Takes a job out that waits; returns whether it did."""
        with FileLock(self._folder / ENTRY_LOCK, timeout=10):
            place = self._place(number)
            if not place.is_dir() or Detached(place).state != "waiting":
                return False
            place.rename(place.with_name(f"cancelled-{place.name}-{time.time_ns()}"))
            return True

    def start_starter(self) -> None:
        """Makes sure that a process starts what waits."""
        spawn(["-m", "stoker.page.job_queue", str(self._state)])

    def has_starter(self) -> bool:
        """Whether such a process lives."""
        try:
            with FileLock(self._folder / STARTER_LOCK, timeout=0):
                return False
        except Timeout:
            return True

    def run_starter(self) -> None:
        """Starts jobs until none is left."""
        try:
            with FileLock(self._folder / STARTER_LOCK, timeout=PATIENCE):
                while self._start_next():
                    time.sleep(POLL)
        except Timeout:  # another one does
            return

    def _start_next(self) -> bool:
        """Starts the jobs for which there are devices; returns whether anything waits or runs."""
        with FileLock(self._folder / ENTRY_LOCK, timeout=10):
            entries = self.entries()
            states = [process.state for _, process in entries]
            busy = sum(state in ("starting", "running") for state in states)
            waiting = [process for (_, process), state in zip(entries, states, strict=True) if state == "waiting"]
            if waiting and not busy:
                waiting[0].start()
                busy = 1
            return bool(waiting or busy)

    def _place(self, number: int) -> Path:
        return self._folder / f"{number:06d}"


if __name__ == "__main__":
    JobQueue(Path(sys.argv[1])).run_starter()
