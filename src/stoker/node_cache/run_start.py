"""The start of this run: content whose origin reports no version is trusted if it was downloaded after it."""

from __future__ import annotations

import time

TOGETHER = 30.0  # maximum difference in seconds between the starts of a run's processes, if none starts the others
_STARTS = [time.time() - TOGETHER]  # one process takes part in one run


def run_start() -> float:
    """Returns the time in seconds since 1970; by default a little before the start of this process."""
    return _STARTS[0]


def set_run_start(began: float) -> None:
    """Sets the time to that of the process that has started this one."""
    _STARTS[:] = [began]
