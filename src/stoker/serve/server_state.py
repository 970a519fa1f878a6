"""State that every server has: its options, limits and counters."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request

from stoker.serve.api_error import ApiError
from stoker.serve.guard import Queue, read_json
from stoker.serve.metrics import Metrics
from stoker.serve.server_options import ServerOptions


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
