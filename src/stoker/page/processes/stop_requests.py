"""Processes that were asked to stop: a second signal ends a run without a checkpoint.

``stopping/PID.json`` in the page's folder of state is such a process; its modification time is that of the request.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import psutil

from stoker.page.processes.detached_process import process_at, write_process
from stoker.page.processes.job_queue import JobQueue
from stoker.resilience.stop_signals import SAME
from stoker.runs.lock_holder import holder_of
from stoker.runs.run_folder import RunFolder

MARGIN = 0.5  # seconds that the first signal may arrive late


class StopRequests:
    """The processes that a page has asked to stop, also before it was restarted."""

    def __init__(self, state: Path, queue: JobQueue) -> None:
        self._folder, self._queue = state / "stopping", queue

    def process_of(self, run: Path) -> psutil.Process | None:
        """Returns the process that trains in a run's folder, or that of its job; the stages of a job share one."""
        holder = holder_of(RunFolder(run))
        queued = self._queue.of_run(run) if holder is None else None
        return queued[1].process if queued is not None else holder

    def add(self, process: psutil.Process) -> None:
        """Records that a process was asked to stop; forgets those that have ended."""
        for path in self._folder.glob("*.json"):
            if process_at(path) is None:
                path.unlink(missing_ok=True)
        with suppress(psutil.Error):  # it has ended
            write_process(self._place(process), process)

    def has(self, run: Path) -> bool:
        """Returns whether the process of a run was asked to stop, and has not ended yet."""
        if not any(self._folder.iterdir()):
            return False
        process = self.process_of(run)
        return process is not None and process_at(self._place(process)) == process

    def wait(self, run: Path) -> None:
        """Waits, some seconds at most, until a second signal to a run that is stopping does not count as the first."""
        process = self.process_of(run) if self.has(run) else None
        if process is not None:
            with suppress(FileNotFoundError):
                asked = self._place(process).stat().st_mtime
                time.sleep(min(SAME, max(0.0, asked + SAME - time.time())) + MARGIN)

    def _place(self, process: psutil.Process) -> Path:
        return self._folder / f"{process.pid}.json"
