"""Calls that wait for another machine, several at once, while this process computes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from threading import Thread
from types import TracebackType
from typing import Generic, Self, TypeVar

AT_ONCE = 8

T = TypeVar("T")


class ConcurrentCalls(Generic[T]):
    """A context whose calls run in up to `AT_ONCE` threads, in the order in which they are submitted.

    Leaving the context drops the calls that have not begun. The threads are daemons, unlike those of
    `concurrent.futures`: a request may take minutes, and a process that a signal ends does not wait for it.
    """

    def __init__(self) -> None:
        self._waiting: SimpleQueue[tuple[Future[T], Callable[[], T]] | None] = SimpleQueue()
        self._threads = 0
        self._error: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            while True:
                self._waiting.get_nowait()
        except Empty:
            pass
        for _ in range(self._threads):
            self._waiting.put(None)

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Queues a call.

        Raises:
            Exception: the error of an earlier call: its caller need not compute what is to follow.
        """
        if self._error is not None:
            raise self._error
        future: Future[T] = Future()
        self._waiting.put((future, call))
        if self._threads < AT_ONCE:
            self._threads += 1
            Thread(target=self._work, daemon=True).start()
        return future

    def _work(self) -> None:
        while (waiting := self._waiting.get()) is not None:
            future, call = waiting
            try:
                future.set_result(call())
            except BaseException as error:
                self._error = error
                future.set_exception(error)
