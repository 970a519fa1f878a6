"""Responses as server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.types import Receive, Scope, Send

from stoker.errors import UserError
from stoker.serve.api_error import ApiError, of_user_error
from stoker.serve.guard import unless_left

DONE = b"data: [DONE]\n\n"


def event(value: Any) -> bytes:
    """Formats a JSON value as an event."""
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class EventStream:
    """ASGI response of events; the work behind it is cancelled when the client disconnects.

    Errors before the first event are raised. A later error is sent as an event, after which the stream ends.
    """

    def __init__(self, events: AsyncIterator[bytes], seconds: float, headers: Mapping[str, str]) -> None:
        self._events, self._seconds = events, seconds
        self._headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", **headers}
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_left(receive, self._send(send), self._seconds)
        except (ApiError, UserError) as found:
            error = of_user_error(found) if isinstance(found, UserError) else found
            if not self._begun:
                raise error from None
            await send({"type": "http.response.body", "body": event(error.as_json()), "more_body": False})

    async def _send(self, send: Send) -> None:
        try:
            async for body in self._events:
                if not self._begun:
                    self._begun = True
                    headers = [(name.encode(), value.encode()) for name, value in self._headers.items()]
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._events.aclose()  # type: ignore[attr-defined]
