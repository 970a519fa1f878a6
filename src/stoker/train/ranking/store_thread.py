"""Calls to a store in daemon threads, which are waited for with a timeout and never keep the process alive."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from stoker.errors import RunFailed
from stoker.hardware.process.daemon_thread import in_daemon_thread
from stoker.online_store.store_writers import shown_place

T = TypeVar("T")


class StoreThread:
    """Runs calls one after another in threads.

    A store can stop answering without an error: another process holds the lock of an LMDB, a network file system hangs.
    A call cannot be cancelled, so its thread is a daemon, and waiting has a timeout.

    Args:
        place: place of the store, for messages.
    """

    def __init__(self, place: str) -> None:
        self._place = shown_place(place)
        self._last: Future[Any] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether the last call is still running."""
        return self._last is not None and not self._last.done()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Starts a call after the previous one has ended."""
        before = self._last

        def run() -> T:
            if before is not None:
                wait([before])
            return call()

        future = in_daemon_thread(run, "export-sync")
        self._last = future
        return future

    def wait(self, call: Future[Any], *, seconds: float) -> None:
        """Waits until a call has returned or raised.

        Raises:
            RunFailed: it has done neither within the timeout.
        """
        _, waiting = wait([call], seconds)
        if waiting:
            raise RunFailed(f"{self._place} has not answered for {seconds:g} s")

    def do(self, call: Callable[[], T], *, seconds: float) -> T:
        """Runs a call and returns its result.

        Raises:
            RunFailed: it has not returned within the timeout.
            Exception: the call raised it.
        """
        future = self.submit(call)
        self.wait(future, seconds=seconds)
        return future.result()
