"""Starts child processes with signals blocked."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker


@contextmanager
def blocked_signals(numbers: Iterable[signal.Signals]) -> Iterator[None]:
    """Blocks signals in this thread: a process that starts here begins with them blocked, until it has handlers."""
    resource_tracker.ensure_running()  # it would unblock the signals again if it began later
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
