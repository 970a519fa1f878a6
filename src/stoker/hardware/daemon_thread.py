"""A call in a thread of its own, which never keeps the process alive."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def in_daemon_thread(call: Callable[[], T], name: str) -> Future[T]:
    """Begins a call; the thread ends with it. The future has what it gave or raised."""
    future = Future[T]()
    Thread(target=_run, args=(call, future), name=name, daemon=True).start()
    return future


def _run(call: Callable[[], T], future: Future[T]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)
        del call, future  # the error's traceback holds this frame, and would keep the error and all it holds alive
