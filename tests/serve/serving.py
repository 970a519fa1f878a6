"""Servers for tests: a process, and an application in this one."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.serve.app import app_of
from stoker.serve.endpoint_state import Service
from stoker.serve.served_models.open_served import open_served
from stoker.serve.server_options import ServerOptions
from stoker.serve.torch_server import service_of


@dataclass
class Reply:
    """A response of the application."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return dict(self.json["error"])


@dataclass
class InProcess:
    """The application without a socket."""

    service: Service

    def __post_init__(self) -> None:
        self.app = app_of(self.service)

    def post(self, path: str, body: Any, **options: Any) -> Reply:
        """Asks, and waits for the whole response."""
        return asyncio.run(self.ask("POST", path, body, **options))

    def get(self, path: str, **options: Any) -> Reply:
        """Sends a GET request."""
        return asyncio.run(self.ask("GET", path, b"", **options))

    async def ask(
        self,
        method: str,
        path: str,
        body: Any,
        *,
        headers: dict[str, str] | None = None,
        left: asyncio.Event | None = None,
        heard: Callable[[bytes], None] | None = None,
    ) -> Reply:
        """Asks; the client leaves when ``left`` is set, and every part of the response goes to ``heard``."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {"host": "127.0.0.1:1", "content-type": "application/json", **(headers or {})}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(k.encode(), v.encode()) for k, v in given.items()],
            "scheme": "http",
            "server": ("127.0.0.1", 1),
            "client": ("127.0.0.1", 2),
            "root_path": "",
        }
        sent = False
        reply = Reply(0, {}, b"")

        async def receive() -> dict[str, Any]:
            nonlocal sent
            if not sent:
                sent = True
                return {"type": "http.request", "body": content, "more_body": False}
            await (left or asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                reply.status = message["status"]
                reply.headers = {k.decode(): v.decode() for k, v in message["headers"]}
                return
            reply.body += message.get("body", b"")
            if heard is not None:
                heard(message.get("body", b""))

        await self.app(scope, receive, send)
        return reply


@contextmanager
def in_process(home: Path, names: list[str], options: ServerOptions | None = None) -> Iterator[InProcess]:
    """An application that serves models of the folder."""
    service = service_of(open_served(names, home), options or ServerOptions())
    service.worker.start()
    try:
        yield InProcess(service)
    finally:
        service.worker.close()


@dataclass
class Started:
    """A process of ``stoker serve``."""

    process: subprocess.Popen[str]
    url: str


@contextmanager
def started(home: Path, *words: str) -> Iterator[Started]:
    """Starts ``stoker serve`` on a free port."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "stoker", "serve", *words, "--port", "0"]
    process = subprocess.Popen(command, cwd=home, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("listening on "):
                yield Started(process, line.split()[2])
                return
        raise AssertionError(f"the server ended with {process.wait()}")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
