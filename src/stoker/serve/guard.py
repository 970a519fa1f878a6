"""Checks the authorisation of every request, counts it, and ends the work of clients that have left."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stoker.errors import UserError
from stoker.serve.api_error import ApiError
from stoker.serve.metrics import CALLER, Metrics
from stoker.serve.named_keys import ADMIN
from stoker.serve.server_options import ServerOptions, host_of, is_loopback

T = TypeVar("T")
OPEN = ("/health",)  # served without a token
ADMINS = ("/metrics", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")  # for the token and admin keys


class ClientLeft(Exception):
    """The client has closed the connection."""


class RequestGuard:
    """ASGI middleware that checks authorisation and limits, and counts requests."""

    def __init__(self, app: ASGIApp, options: ServerOptions, metrics: Metrics, paths: frozenset[str]) -> None:
        self._app, self._options, self._metrics, self._paths = app, options, metrics, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, begun = 500, time.monotonic()
        path = scope["path"] if scope["path"] in self._paths else "other"

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        with self._metrics.in_flight.track_inprogress():
            try:
                refused = self._refused(scope)
                if refused is not None:
                    await error_response(refused)(scope, receive, counted)
                else:
                    await self._app(scope, receive, counted)
            except ClientLeft:
                status = 499  # the status that nginx records
                self._metrics.cancelled.inc()
            finally:
                self._metrics.requests.labels(path, str(status)).inc()
                self._metrics.duration.labels(path).observe(time.monotonic() - begun)

    def _refused(self, scope: Scope) -> ApiError | None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        if self._options.open and not is_loopback(host_of(headers.get(b"host", ""))):
            # A web page can reach loopback through its own host name that resolves there.
            return ApiError(403, "without a token only requests to a loopback address are answered")
        if scope["path"] not in OPEN:
            try:
                caller = self._options.caller(headers.get(b"authorization", ""))
            except UserError as error:
                print(f"error: {error}", file=sys.stderr, flush=True)
                return ApiError(503, "the server's file of keys cannot be read", code="keys_unreadable", retry_after=5)
            if caller is None:
                return ApiError(401, "a token is needed: Authorization: Bearer TOKEN", code="invalid_api_key")
            if scope["path"] in ADMINS and caller.role != ADMIN:
                return ApiError(403, f"the key {caller.name} may not use {scope['path']}: it needs the role admin")
            CALLER.set(caller.name)
        return _refused_body(headers) if scope["method"] == "POST" else None


def _refused_body(headers: Mapping[bytes, str]) -> ApiError | None:
    kind = headers.get(b"content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # Browsers send other content types cross-origin without a preflight request.
        return ApiError(415, "the body must be JSON: Content-Type: application/json")
    if headers.get(b"content-encoding", "identity").strip().lower() != "identity":
        return ApiError(415, "the body must be sent as it is, without Content-Encoding")
    return None


def error_response(error: ApiError) -> JSONResponse:
    """Converts an error to a response."""
    return JSONResponse(error.as_json(), error.status, headers=dict(error.headers))


async def unless_left(receive: Receive, work: Coroutine[Any, Any, T], seconds: float) -> T:
    """Awaits work; cancels it when the client disconnects or at the timeout.

    Raises:
        ClientLeft: the client disconnected.
        ApiError: the timeout has passed.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({task, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if gone.done():
            raise ClientLeft
        raise too_slow(seconds)
    finally:
        await _ended(task, gone)


def too_slow(seconds: float) -> ApiError:
    """Returns the error for a timeout."""
    return ApiError(504, f"the answer took more than {seconds:g} s", code="timeout")


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _ended(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    waited: list[Awaitable[Any]] = list(tasks)
    await asyncio.gather(*waited, return_exceptions=True)
