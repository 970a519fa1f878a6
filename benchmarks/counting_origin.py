"""A web server that counts what it sends, and misbehaves where it is told to. For benchmarks and tests."""

from __future__ import annotations

import re
import threading
import time
import zlib
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

BLOCK = 256 * 1024  # bytes sent at a time


@dataclass
class CountingOrigin:
    """Serves bytes by name at ``http://127.0.0.1:PORT``, within a ``with``.

    Attributes:
        objects: what it serves; may change at any time.
        tags: entity tags, by name; by default one that changes with the content; empty for none.
        ranges: whether it answers requests for parts with parts.
        lengths: whether it says how long an object is; else answers come in chunks.
        closes: whether only the end of the connection says where an object ends.
        cut: names of objects whose next answer ends after so many bytes of it.
        rate: bytes a second of each connection; 0 without limit.
        headers: further headers, by name of the object.
        requests: (method, name, range) of each request.
        sent: bytes of objects that were sent, by name.
    """

    objects: dict[str, bytes] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    ranges: bool = True
    lengths: bool = True
    closes: bool = False
    cut: dict[str, int] = field(default_factory=dict)
    rate: float = 0.0
    headers: dict[str, dict[str, str]] = field(default_factory=dict)
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=dict)

    def __enter__(self) -> Self:
        origin, self.over = self, False

        class Handler(_Handler):
            of = origin

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.lock = threading.Lock()
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.over = True
        self._server.shutdown()
        self._server.server_close()

    @property
    def total(self) -> int:
        """Bytes of objects that were sent."""
        return sum(self.sent.values())

    def asked(self, method: str, name: str) -> int:
        """How many requests of a kind there were for an object."""
        return sum(request[:2] == (method, name) for request in self.requests)

    def tag(self, name: str) -> str:
        """The entity tag of an object."""
        return self.tags.get(name, f'"{zlib.crc32(self.objects[name]):x}"')


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    of: CountingOrigin

    def log_message(self, *_: Any) -> None:
        """Says nothing."""

    def handle_one_request(self) -> None:
        """One request; a client that has gone ends the connection."""
        try:
            super().handle_one_request()
        except ConnectionError:
            self.close_connection = True

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        origin, name = self.of, self.path.partition("?")[0].lstrip("/")
        if origin.over:  # a connection that was kept
            self.close_connection = True
            return
        wanted = self.headers.get("Range", "")
        with origin.lock:
            origin.requests.append((self.command, name, wanted))
            data = origin.objects.get(name)
            cut = origin.cut.pop(name, None) if body and data is not None else None
        if data is None:
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", wanted) if origin.ranges else None
        start, end = 0, len(data)
        if match:
            start, end = int(match[1]), min(end, int(match[2]) + 1) if match[2] else end
        self.send_response(206 if match else 200)
        if match:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
        if origin.closes:
            self.close_connection = True
        elif origin.lengths:
            self.send_header("Content-Length", str(end - start))
        else:
            self.send_header("Transfer-Encoding", "chunked")
        if tag := origin.tag(name):
            self.send_header("ETag", tag)
        for header, value in origin.headers.get(name, {}).items():
            self.send_header(header, value)
        self.end_headers()
        if body:
            self._send(name, memoryview(data)[start:end], cut)

    def _send(self, name: str, data: memoryview, cut: int | None) -> None:
        origin, began, at = self.of, time.monotonic(), 0
        stop = len(data) if cut is None else min(cut, len(data))
        block = BLOCK if not origin.rate else max(1, min(BLOCK, int(origin.rate / 20)))
        try:
            while at < stop:
                part = data[at : min(stop, at + block)]
                if origin.lengths or origin.closes:
                    self.wfile.write(part)
                else:
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(part), bytes(part)))
                at += len(part)
                with origin.lock:
                    origin.sent[name] = origin.sent.get(name, 0) + len(part)
                if origin.rate:
                    time.sleep(max(0.0, at / origin.rate - (time.monotonic() - began)))
            if not origin.lengths and not origin.closes and cut is None:
                self.wfile.write(b"0\r\n\r\n")
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        if cut is not None:
            self.close_connection = True
