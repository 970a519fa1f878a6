"""Runs reads of data files in threads, a few at a time; each ends at a timeout, or when the client leaves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from anyio import CapacityLimiter, to_thread
from starlette.requests import Request

from stoker.data.files.byte_streams import Check
from stoker.page.page_error import http_error
from stoker.serve.api_error import ApiError
from stoker.serve.guard import unless_left

AT_ONCE = 4  # concurrent reads; the other routes have threads of their own
T = TypeVar("T")


class _Ended(Exception):
    """Nobody waits for the read any more."""


class FileReads:
    """Runs reads for requests."""

    def __init__(self) -> None:
        self._room = CapacityLimiter(AT_ONCE)

    async def run(self, request: Request, work: Callable[[Check], T], *, seconds: float) -> T:
        """Returns the result of a read, which calls its argument often: that raises when nobody waits any more.

        Raises:
            PageError: the timeout has passed.
            ClientLeft: the client disconnected.
        """
        has_ended = threading.Event()

        def check() -> None:
            if has_ended.is_set():
                raise _Ended

        async def read() -> T:
            try:
                return await to_thread.run_sync(work, check, limiter=self._room)
            finally:
                has_ended.set()

        try:
            return await unless_left(request.receive, read(), seconds)
        except ApiError:
            raise http_error(504, "reading the file took more than {seconds} s", seconds=seconds) from None
