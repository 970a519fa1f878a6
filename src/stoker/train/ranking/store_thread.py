"""Calls of a store in threads: they are waited for with a limit, and never keep the process alive."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from stoker.errors import RunFailed
from stoker.hardware.daemon_thread import in_daemon_thread
from stoker.online_store.store_writers import shown_place

T = TypeVar("T")


class StoreThread:
    """Runs one call after another, beside the thread that asks for them.

    A store can stop answering without an error: the lock of an LMDB that another process holds, a network file
    system. A call cannot be taken back, so its thread is a daemon, and whoever waits does so for a limited time.

    Args:
        place: of the store, for messages.
    """

    def __init__(self, place: str) -> None:
        self._place = shown_place(place)
        self._last: Future[Any] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether the last call has not returned."""
        return self._last is not None and not self._last.done()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Begins a call, once the one before it has ended."""
        before = self._last

        def run() -> T:
            if before is not None:
                wait([before])
            return call()

        future = in_daemon_thread(run, "export-sync")
        self._last = future
        return future

    def wait(self, call: Future[Any], *, seconds: float) -> None:
        """Waits until a call has returned or raised, which its future says.

        Raises:
            RunFailed: it has done neither in this time.
        """
        _, waiting = wait([call], seconds)
        if waiting:
            raise RunFailed(f"{self._place} has not answered for {seconds:g} s")

    def do(self, call: Callable[[], T], *, seconds: float) -> T:
        """What a call gives.

        Raises:
            RunFailed: it has not returned in this time.
            Exception: what it raised.
        """
        future = self.submit(call)
        self.wait(future, seconds=seconds)
        return future.result()
