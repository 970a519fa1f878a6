"""The proxy without its engine: what it sends and refuses, an engine that ends, and a port that is taken."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
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


CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
ANSWER = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}}


def behind(
    program: str, answer: Callable[[httpx2.Request], httpx2.Response], options: ServerOptions | None = None
) -> Asked:
    """The proxy before an engine of the test."""
    server = SimpleNamespace(program=program, key="the-key", names=("m",))
    running = SimpleNamespace(server=server, address="http://127.0.0.1:9", alive=True)
    proxy = Proxy(cast(Any, running), options or ServerOptions())
    proxy._client = httpx2.AsyncClient(transport=httpx2.MockTransport(answer))
    return Asked(proxy)


@pytest.mark.parametrize(
    ("program", "path", "given", "sent"),
    [
        (
            "llama.cpp",
            "chat/completions",
            CHAT
            | {"max_completion_tokens": 7, "seed": 2**32 - 1, "repetition_penalty": 1.5, "top_k": -1, "user": "me"},
            CHAT | {"max_tokens": 7, "seed": 0, "repeat_penalty": 1.5, "temperature": 1.0},
        ),
        (
            "vLLM",
            "completions",
            {"model": "m", "prompt": "x", "temperature": 0.5, "seed": 2**32 - 1, "stop_token_ids": [7], "user": "me"},
            {"model": "m", "prompt": "x", "temperature": 0.5, "seed": 2**32 - 1, "stop_token_ids": [7]}
            | {"max_tokens": 16, "repetition_penalty": 1.0},
        ),
    ],
)
def test_an_engine_gets_the_defaults_of_the_api_and_its_own_key(
    program: str, path: str, given: dict[str, Any], sent: dict[str, Any]
) -> None:
    requests: list[httpx2.Request] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        requests.append(request)
        return httpx2.Response(200, json=ANSWER)

    asked = behind(program, answer)
    reply = asked.post(f"/v1/{path}", given)
    assert reply.json == ANSWER and reply.headers["x-stoker-ignored"] == "user"
    (request,) = requests
    assert request.url == f"http://127.0.0.1:9/v1/{path}" and request.headers["authorization"] == "Bearer the-key"
    assert json.loads(request.content) == {"top_p": 1.0, "top_k": 0, "min_p": 0.0} | sent
    page = asked.get("/metrics").body.decode()
    assert 'stoker_prompt_tokens_total{key="",model="m"} 5.0' in page
    assert 'stoker_answer_tokens_total{key="",model="m"} 3.0' in page


@pytest.mark.parametrize(
    ("path", "fields", "says"),
    [
        ("chat/completions", CHAT | {"min_tokens": 1}, "`min_tokens` is not there with llama.cpp"),
        ("chat/completions", CHAT | {"stop_token_ids": [1]}, "`stop_token_ids` is not there with llama.cpp"),
        ("chat/completions", CHAT | {"model": "n"}, "there is no model 'n'; there are: m"),
        (
            "chat/completions",
            CHAT | {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "1"}}]}]},
            "is not a JSON object",
        ),
        ("completions", {"model": "m", "prompt": "x", "echo": True}, "`echo` is not there with llama.cpp"),
        ("completions", {"model": "m", "prompt": "x", "logprobs": 0}, "`logprobs` of completions are not there"),
        ("completions", {"model": "m", "prompt": ["x", "y"], "n": 2}, "for 4 answers, and the server's queue takes 3"),
    ],
)
def test_what_llama_cpp_would_not_do_never_reaches_it(path: str, fields: dict[str, Any], says: str) -> None:
    asked = behind("llama.cpp", lambda _: pytest.fail("it was asked"), ServerOptions(queue=3))
    reply = asked.post(f"/v1/{path}", fields)
    assert reply.status in (400, 404) and says in reply.error["message"]


class Engine(BaseHTTPRequestHandler):
    """Answers each request alike."""

    def do_POST(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(ANSWER).encode())

    def log_message(self, *_: Any) -> None: ...


def test_a_proxy_of_the_environment_is_not_between_the_server_and_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with HTTPServer(("127.0.0.1", 0), Engine) as engine:
        thread = threading.Thread(target=engine.serve_forever)
        thread.start()
        asked = behind("vLLM", lambda _: pytest.fail("its own client is used"))
        asked.service._client = None  # type: ignore[attr-defined]
        asked.service.running.address = f"http://127.0.0.1:{engine.server_port}"  # type: ignore[attr-defined]
        assert asked.post("/v1/chat/completions", CHAT).json == ANSWER
        engine.shutdown()
        thread.join()


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


@pytest.mark.parametrize("requested", [{}, {"top_logprobs": 0}, {"top_logprobs": 2}])
def test_llama_cpp_returns_the_alternatives_that_were_requested_and_no_field_of_its_own(
    requested: dict[str, int],
) -> None:
    sent: dict[str, Any] = {}
    number = requested.get("top_logprobs", 0)

    def token(text: str) -> dict[str, Any]:
        return {"id": 7, "token": text, "logprob": -1.0, "bytes": list(text.encode())}

    def chunk(kind: str) -> dict[str, Any]:
        scored = token("\u2028") | {"top_logprobs": [token("\u2028"), token("b")][: sent["top_logprobs"]]}
        content = {"index": 0, kind: {"content": "\u2028"}, "logprobs": {"content": [scored]}}
        return {"choices": [content], "timings": {"predicted_ms": 1.0}}

    class Parts(httpx2.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "timings": {}}
            events = [f"data: {json.dumps(each, ensure_ascii=False)}\n\n" for each in (chunk("delta"), last)]
            whole = "".join([*events, "data: [DONE]\n\n"]).encode()
            for start in range(0, len(whole), 10):  # events in several parts
                yield whole[start : start + 10]

    def answer(request: httpx2.Request) -> httpx2.Response:
        sent.update(json.loads(request.content))
        return httpx2.Response(200, stream=Parts()) if sent["stream"] else httpx2.Response(200, json=chunk("message"))

    asked = behind("llama.cpp", answer)
    for stream in (False, True):
        reply = asked.post("/v1/chat/completions", CHAT | {"stream": stream, "logprobs": True} | requested)
        assert sent["top_logprobs"] == max(1, number)
        events = reply.body.decode().split("\n\n") if stream else []
        assert not stream or events[2:] == ["data: [DONE]", ""]
        found = [json.loads(event.removeprefix("data: ")) for event in events[:2]] if stream else [reply.json]
        assert all(set(each) == {"choices"} for each in found)
        (scored,) = found[0]["choices"][0]["logprobs"]["content"]
        assert scored["token"] == "\u2028" and "id" not in scored
        assert [set(each) for each in scored["top_logprobs"]] == [{"token", "logprob", "bytes"}] * number


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
