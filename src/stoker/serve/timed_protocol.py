"""HTTP connections whose requests must arrive in time. uvicorn limits only the pause after an answer."""

from __future__ import annotations

import asyncio
import resource
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10.0  # from the connection, or the first byte of a later request, to the end of the headers


def most_idle() -> int:
    """Returns how many connections may be without a request: half of the files that this process may open."""
    return max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


class TimedProtocol(H11Protocol):
    """Closes a connection whose request's headers do not arrive in time, and the oldest idle one where there are many.

    h11 limits the size of the headers.
    """

    _idle: ClassVar[dict[TimedProtocol, None]] = {}  # without a request, in the order in which they became idle
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()
        if len(self._idle) > most_idle():
            oldest = next(iter(self._idle))
            oldest._forget()
            oldest.transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._forget()

    def _watch(self) -> None:
        answered = self.conn.our_state is h11.DONE  # before the end of the request's body, which may never arrive
        if self.transport.is_closing() or (self.conn.their_state is not h11.IDLE and not answered):
            self._forget()
            return
        self._idle.setdefault(self)
        if self._deadline is None and self.timeout_keep_alive_task is None:
            self._deadline = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def _forget(self) -> None:
        self._idle.pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
