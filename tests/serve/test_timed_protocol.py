"""Connections without a complete request: they end in time, and the oldest make room for new ones."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from uvicorn.server import ServerState

from stoker.serve import timed_protocol
from stoker.serve.server import config_of
from stoker.serve.timed_protocol import TimedProtocol

Talk = Callable[[int], Awaitable[None]]
REQUEST = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


async def _answer(scope: Any, receive: Any, send: Any) -> None:
    client = scope["client"][0].encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(client))]})
    await send({"type": "http.response.body", "body": client})


def _serve(talk: Talk, keep_alive: int = 30) -> None:
    """Runs a conversation with a server, given its port."""

    async def run() -> None:
        config = config_of(_answer, tls=None, seconds=1)
        config.timeout_keep_alive = keep_alive
        state, loop = ServerState(), asyncio.get_running_loop()
        server = await loop.create_server(lambda: TimedProtocol(config, state, {}), "127.0.0.1", 0)
        async with server:
            await asyncio.wait_for(talk(server.sockets[0].getsockname()[1]), 30)

    asyncio.run(run())


async def _closed(reader: asyncio.StreamReader) -> bool:
    try:
        return await reader.read(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHo", REQUEST + b"GET"])
def test_a_request_that_does_not_arrive_ends_its_connection(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed_protocol, "HEAD_SECONDS", 0.2)

    async def talk(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent[: len(REQUEST)])
        if sent.startswith(REQUEST):
            assert (await reader.readuntil(b"127.0.0.1")).startswith(b"HTTP/1.1 200")
            writer.write(sent[len(REQUEST) :])  # of a second request
        assert await asyncio.wait_for(_closed(reader), 10)
        writer.close()

    _serve(talk)
    assert not TimedProtocol._idle


def test_a_body_that_does_not_arrive_after_its_answer_ends_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed_protocol, "HEAD_SECONDS", 0.2)

    async def talk(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n")
        await reader.readuntil(b"127.0.0.1")
        assert len(TimedProtocol._idle) == 1
        writer.write(b"b")  # ends the timer of uvicorn
        assert await asyncio.wait_for(_closed(reader), 10)
        writer.close()

    _serve(talk)


def test_a_slow_answer_and_a_kept_connection_are_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed_protocol, "HEAD_SECONDS", 0.2)

    async def talk(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            writer.write(REQUEST)
            await reader.readuntil(b"127.0.0.1")
            await asyncio.sleep(0.5)
        writer.close()

    _serve(talk)


def test_the_oldest_idle_connection_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed_protocol, "most_idle", lambda: 3)

    async def talk(port: int) -> None:
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
        assert await asyncio.wait_for(_closed(opened[0][0]), 10)
        for reader, writer in opened[1:]:
            writer.write(REQUEST)
            assert (await reader.readuntil(b"127.0.0.1")).startswith(b"HTTP/1.1 200")
        for _, writer in opened:
            writer.close()

    _serve(talk)


def test_a_request_with_two_lengths_is_refused_and_its_connection_closed() -> None:
    async def talk(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        lengths = b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        writer.write(b"POST / HTTP/1.1\r\nHost: a\r\n" + lengths + REQUEST)
        answer = await asyncio.wait_for(reader.read(), 10)
        assert answer.startswith(b"HTTP/1.1 400") and answer.count(b"HTTP/1.1") == 1 and b"not both" in answer
        writer.close()

    _serve(talk)


def test_a_request_that_is_cut_off_at_the_end_is_answered() -> None:
    sent: list[Any] = []

    async def app(*_: Any) -> None:
        await asyncio.sleep(60)

    async def send(message: Any) -> None:
        sent.append(message)

    async def cancelled() -> None:
        config = config_of(app, tls=None, seconds=1)
        task = asyncio.ensure_future(config.loaded_app({"type": "http", "headers": []}, None, send))
        await asyncio.sleep(0)
        task.cancel()
        await task

    asyncio.run(cancelled())
    assert sent[0]["status"] == 503 and b"the server has ended" in sent[1]["body"]


def test_headers_and_a_proxys_address_are_not_taken_from_the_client() -> None:
    config = config_of(_answer, tls=None, seconds=1)
    assert config.http_protocol_class is TimedProtocol and not config.proxy_headers
