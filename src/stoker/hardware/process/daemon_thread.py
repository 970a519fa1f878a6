"""Runs a call in a separate daemon thread, which never keeps the process alive."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def in_daemon_thread(call: Callable[[], T], name: str) -> Future[T]:
    """Starts a call in a thread that ends with it; returns a future of its result or exception."""
    future = Future[T]()
    Thread(target=_run, args=(call, future), name=name, daemon=True).start()
    return future


def _run(call: Callable[[], T], future: Future[T]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)
        del call, future  # the error's traceback references this frame: a cycle that would keep the error alive
