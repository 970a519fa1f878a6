"""The signals that end a run, and who gets them."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

STOPS = (signal.SIGINT, signal.SIGTERM)
PAUSE = signal.SIGUSR1  # from the supervisor alone: stop after this step, and leave the state in memory
STOPPING = "stopping after this step ... (once more to stop at once, without a checkpoint)"


@contextmanager
def handled_by(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Context in which the signals go to a handler; outside the main thread it changes nothing."""
    try:
        before = {number: signal.signal(number, handler) for number in STOPS}
    except ValueError:
        before = {}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
