"""Process of a server: socket, signals and shutdown."""

from __future__ import annotations

import argparse
import asyncio
import errno
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stoker.errors import Problem, RunFailed, UserError, reason_of
from stoker.serve.api_error import ApiError, bad_request
from stoker.serve.timed_protocol import TimedProtocol

BACKLOG = 512


@dataclass(frozen=True)
class Tls:
    """PEM files of TLS."""

    key: Path
    certificate: Path


def tls_of(arguments: argparse.Namespace) -> Tls | None:
    """Returns the key and the certificate of a command line."""
    return None if arguments.tls_key is None else Tls(arguments.tls_key, arguments.tls_certificate)


def listening_socket(host: str, port: int) -> socket.socket:
    """Opens a socket that listens on an address.

    Raises:
        UserError: the address does not exist, or the port is taken.
    """
    try:
        kind, _, _, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(kind, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(BACKLOG)
        return bound
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            message = f"cannot listen on {host} port {port}, which is in use"
            raise UserError(Problem(message, "choose another port (0: a free one)")) from error
        raise UserError(f"cannot listen on {host} port {port}: {reason_of(error)}") from error


def address_of(bound: socket.socket, tls: Tls | None) -> str:
    """Returns the URL of a socket."""
    host, port = bound.getsockname()[:2]
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


class _Server(uvicorn.Server):
    """Uvicorn server that prints its address, and shuts down gracefully after SIGTERM or SIGINT."""

    def __init__(self, config: uvicorn.Config, address: str, drain: Callable[[], None]) -> None:
        super().__init__(config)
        self._address, self._drain = address, drain

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Prints the address after uvicorn's startup."""
        await super().startup(sockets)
        print(f"listening on {self._address}", flush=True)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Replaces uvicorn's handlers, which raise the signal again at the end; this server exits with success."""

        def end(number: int, _: object) -> None:
            if self.should_exit:
                self.force_exit = True  # a second signal
            self.should_exit = True
            self._drain()

        before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _with_one_length(app: ASGIApp) -> ASGIApp:
    """Returns the application without requests whose body has two lengths, on which a proxy may not agree."""

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        names = {name for name, _ in scope.get("headers", ())}
        if names >= {b"content-length", b"transfer-encoding"}:
            error = bad_request("a request has Content-Length or Transfer-Encoding, not both")
            await JSONResponse(error.as_json(), error.status, {"connection": "close"})(scope, receive, send)
            return
        await app(scope, receive, send)

    return checked


def _with_clean_end(app: ASGIApp) -> ASGIApp:
    """Returns the application; a request that is cut off at the end of the server is answered with an error."""

    async def answered(scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def noted(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await app(scope, receive, noted)
        except asyncio.CancelledError:  # only uvicorn cancels a request, and would log a traceback
            if not has_begun:
                error = ApiError(503, "the server has ended", retry_after=5)
                await JSONResponse(error.as_json(), error.status, dict(error.headers))(scope, receive, send)

    return answered


def config_of(app: ASGIApp, *, tls: Tls | None, seconds: float) -> uvicorn.Config:
    """Returns uvicorn's configuration, loaded.

    Raises:
        UserError: the key and the certificate cannot be used.
    """
    config = uvicorn.Config(
        _with_clean_end(_with_one_length(app)),
        http=TimedProtocol,
        log_level="error",
        access_log=False,
        lifespan="off",
        server_header=False,
        proxy_headers=False,  # a client on this machine could give itself any address
        timeout_keep_alive=30,
        timeout_graceful_shutdown=max(1, int(seconds)),
        ssl_keyfile=str(tls.key) if tls else None,
        ssl_certfile=str(tls.certificate) if tls else None,
    )
    try:
        config.load()
    except OSError as error:  # SSLError is one
        raise UserError(f"the key and the certificate cannot be used: {reason_of(error)}") from error
    return config


def serve(app: ASGIApp, bound: socket.socket, *, tls: Tls | None, seconds: float, drain: Callable[[], None]) -> None:
    """Serves until SIGTERM or SIGINT, then finishes the current requests.

    Args:
        seconds: timeout of these requests.
        drain: called at the signal.
    """
    server = _Server(config_of(app, tls=tls, seconds=seconds), address_of(bound, tls), drain)
    server.run(sockets=[bound])
    if not server.started:
        raise RunFailed("the server did not start")
    print("ended", file=sys.stderr, flush=True)
