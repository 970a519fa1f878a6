"""Stops that the page has asked for, by the run's folder: a second signal ends a run without a checkpoint."""

from __future__ import annotations

from pathlib import Path

import psutil


class StopRequests:
    """The processes that were asked to stop, as long as this page runs."""

    def __init__(self) -> None:
        self._asked: dict[Path, psutil.Process] = {}

    def add(self, run: Path, process: psutil.Process) -> None:
        """Records that the process of a run was asked to stop."""
        self._asked[run] = process

    def has(self, run: Path) -> bool:
        """Returns whether the process of a run was asked to stop, and has not ended yet."""
        process = self._asked.get(run)
        try:
            return process is not None and process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False
