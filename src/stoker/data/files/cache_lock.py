"""The lock under which a cache folder is built, so that two processes never build it at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event

from filelock import FileLock, Timeout

from stoker.errors import Problem, RunFailed, reason_of
from stoker.hardware.cache_folder import ADVICE

STOP_POLL = 0.2  # seconds between two looks at whether a build that waits for another should stop


class BuildStopped(Exception):
    """The event that stops a background build was set; the shards written so far stay."""


@contextmanager
def lock(folder: Path, stop: Event | None = None) -> Iterator[None]:
    """Holds the lock under which a cache is built: a second process waits and then finds it complete.

    Args:
        stop: ends the wait.

    Raises:
        BuildStopped: ``stop`` was set.
        RunFailed: the folder cannot be written.
    """
    own = FileLock(f"{folder}.lock")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _acquire(own, stop)
    except OSError as error:
        message = f"the cache cannot be written: {error.strerror or reason_of(error)}"
        raise RunFailed(Problem(message, ADVICE, file=str(folder.parent))) from error
    try:
        yield
    finally:
        own.release()


def _acquire(own: FileLock, stop: Event | None) -> None:
    if stop is None:
        own.acquire()
        return
    while not stop.is_set():
        try:
            own.acquire(timeout=STOP_POLL)
            return
        except Timeout:
            pass
    raise BuildStopped
