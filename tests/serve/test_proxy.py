"""The proxy without its engine: an engine that ends while it starts or answers, and a port that is taken."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx2
import pytest
from serving import InProcess

from stoker.errors import UserError
from stoker.serve import external_engine
from stoker.serve.external_engine import ExternalServer, serve_external
from stoker.serve.proxy import Proxy
from stoker.serve.server_options import ServerOptions

STARTING = """
import sys
from stoker.resilience.stop_signals import exit_at_signals
from stoker.serve.external_engine import ExternalServer, RunningServer

program = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
with exit_at_signals():
    RunningServer(ExternalServer("vLLM", (sys.executable, "-S", "-c", program, sys.argv[1]), ("m",), "k", {}, 9))
"""


class Asked(InProcess):
    """The proxy's application without a socket."""

    def __init__(self, proxy: Proxy) -> None:
        self.service = proxy
        self.app = proxy.app()


class Broken(httpx2.AsyncByteStream):
    """A response whose connection ends in its middle."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b'data: {"choices": []}\n\n'
        raise httpx2.ReadError("the connection is lost")


def test_an_engine_that_ends_while_it_answers_is_an_error_of_the_api() -> None:
    server = SimpleNamespace(program="vLLM", key="k", names=("m",))
    running: Any = SimpleNamespace(server=server, address="http://127.0.0.1:9", alive=True)
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    for stream in (False, True):
        proxy = Proxy(running, ServerOptions())
        transport = httpx2.MockTransport(lambda _: httpx2.Response(200, stream=Broken()))
        proxy._client = httpx2.AsyncClient(transport=transport)
        reply = Asked(proxy).post("/v1/chat/completions", body | {"stream": stream})
        assert b"vLLM does not answer: ReadError" in reply.body and b'"engine_failed"' in reply.body
        assert reply.status == (200 if stream else 503)  # the stream has begun, and ends with the error


def test_llama_cpp_gets_a_chosen_function_alone_and_its_error_of_length_the_code_of_openai() -> None:
    server = SimpleNamespace(program="llama.cpp", key="k", names=("m",))
    proxy = Proxy(cast(Any, SimpleNamespace(server=server, address="http://127.0.0.1:9", alive=True)), ServerOptions())
    sent: dict[str, Any] = {}

    def refuse(request: httpx2.Request) -> httpx2.Response:
        sent.update(json.loads(request.content))
        error = {"code": 400, "message": "request (9 tokens) exceeds ...", "type": "exceed_context_size_error"}
        return httpx2.Response(400, json={"error": error})

    proxy._client = httpx2.AsyncClient(transport=httpx2.MockTransport(refuse))
    tools = [{"type": "function", "function": {"name": name}} for name in "ab"]
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": tools}
    chosen = {"type": "function", "function": {"name": "b"}}
    for choice, wanted, listed in ((chosen, "required", tools[1:]), ("auto", "auto", tools)):
        reply = Asked(proxy).post("/v1/chat/completions", body | {"tool_choice": choice})
        assert (sent["tool_choice"], sent["tools"]) == (wanted, listed)
        assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")


def test_a_port_that_is_taken_is_found_before_the_engine_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    server = ExternalServer("vLLM", ("none",), ("m",), "k", {})
    monkeypatch.setattr(external_engine, "server_to_start", lambda _: server)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        arguments = argparse.Namespace(print_command=False, host="127.0.0.1", port=taken.getsockname()[1])
        with pytest.raises(UserError, match=r"which is in use; choose another port \(0: a free one\)"):
            serve_external(arguments, None, lambda: None)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends it on Linux")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_engine_that_is_still_loading_ends_with_this_process(number: int, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    process = subprocess.Popen([sys.executable, "-c", STARTING, str(file)], stderr=subprocess.PIPE)
    engine = int(_wait(lambda: file.exists() and file.read_text()))
    time.sleep(0.2)
    process.send_signal(number)
    process.wait(60)
    assert process.returncode == (143 if number == signal.SIGTERM else -signal.SIGKILL)
    assert _wait(lambda: not _runs(engine))


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _wait(found: Any) -> Any:
    deadline = time.monotonic() + 60
    while not (value := found()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return value
