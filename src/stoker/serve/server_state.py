"""State that every server has: its options, queue and counters."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from starlette.requests import Request

from stoker.serve.api_error import ApiError, bad_request
from stoker.serve.metrics import Metrics
from stoker.serve.request_body import read_json
from stoker.serve.server_options import ServerOptions


class Queue:
    """Counts the answers that are queued or running."""

    def __init__(self, most: int) -> None:
        self.most, self.now = most, 0
        self._seconds = 1.0  # mean duration of a request

    @contextmanager
    def holding(self, answers: int) -> Iterator[None]:
        """Reserves places within the block.

        Raises:
            ApiError: too few places are free; it gives the time until a retry.
        """
        if answers > self.most:
            raise bad_request(f"the request is for {answers:,} answers, and the server's queue takes {self.most:,}")
        if self.now + answers > self.most:
            wait = min(60, max(1, math.ceil(self._seconds)))
            raise ApiError(
                429, f"the queue is full: {self.now:,} answers of {self.most:,}", code="queue_full", retry_after=wait
            )
        begun = time.monotonic()
        self.now += answers
        try:
            yield
        finally:
            self.now -= answers
            self._seconds += 0.2 * (time.monotonic() - begun - self._seconds)


class ServerState:
    """State that every server has.

    Attributes:
        draining: whether it shuts down after the current requests.
    """

    def __init__(self, options: ServerOptions, metrics: Metrics) -> None:
        self.options, self.metrics, self.queue = options, metrics, Queue(options.queue)
        self.draining = False
        self._named: set[str] = set()  # ignored fields that have been logged

    def drain(self) -> None:
        """Refuses further requests."""
        self.draining = True

    @property
    def alive(self) -> bool:
        """Whether the computing threads or the process still run."""
        raise NotImplementedError

    async def read(self, request: Request) -> Any:
        """Returns the JSON of a request.

        Raises:
            ApiError: the server is ending, or the body is not JSON or too long.
        """
        if self.draining:
            raise ApiError(503, "the server is ending", code="draining", retry_after=10)
        return await read_json(request, self.options)

    def ignored_headers(self, ignored: Sequence[str]) -> dict[str, str]:
        """Returns the header that names ignored fields; each is also logged once."""
        new = [name for name in ignored if name not in self._named]
        if new:
            self._named.update(new)
            print(f"ignored fields of requests: {', '.join(new)}", file=sys.stderr, flush=True)
        return {"x-stoker-ignored": ", ".join(sorted(ignored))} if ignored else {}
