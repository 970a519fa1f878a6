"""Proxy before another program's server, with the names, checks and limits of Stoker's own server."""

from __future__ import annotations

import argparse
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from stoker.serve.api_error import ApiError, bad_request, model_not_found
from stoker.serve.app import guarded
from stoker.serve.external_engine import RunningServer
from stoker.serve.guard import unless_left
from stoker.serve.llamacpp_answers import as_openai, events_as_openai, requested_alternatives
from stoker.serve.metrics import CALLER, Metrics
from stoker.serve.openai.bodies import CompletionBody
from stoker.serve.openai.chat_body import ChatBody, ChosenTool
from stoker.serve.openai.chat_completions import DEFAULT_TOKENS, check_calls
from stoker.serve.openai.sampling_fields import SamplingFields
from stoker.serve.openai.sse import EventStream
from stoker.serve.request_body import parse
from stoker.serve.server import serve, tls_of
from stoker.serve.server_options import ServerOptions, options_of
from stoker.serve.server_state import ServerState

LACKS = {"llama.cpp": ("echo", "min_tokens", "stop_token_ids"), "vLLM": ()}
"""Request fields that each program silently ignores."""
TOO_LONG = "exceed_context_size_error"  # llama.cpp's type of the error for a prompt that is longer than the context


class Proxy(ServerState):
    """Forwards requests. Token counts are in the other program's own metrics."""

    def __init__(self, running: RunningServer, options: ServerOptions) -> None:
        super().__init__(options, Metrics())
        self.running = running
        self._client: httpx2.AsyncClient | None = None

    @property
    def alive(self) -> bool:
        return self.running.alive

    def app(self) -> ASGIApp:
        """Returns the ASGI application."""
        routes = [
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
        ]
        return guarded(self, routes)

    async def models(self, _: Request) -> Response:
        """Handles ``/v1/models``."""
        data = [
            {"id": name, "object": "model", "created": 0, "owned_by": self.running.server.program}
            for name in self.running.server.names
        ]
        return JSONResponse({"object": "list", "data": data})

    async def chat(self, request: Request) -> Any:
        """Handles ``/v1/chat/completions``."""
        given = await self.read(request)
        body, ignored = parse(ChatBody, given)
        check_calls(body)
        fields = self._fields(given, body, body.max_completion_tokens or body.max_tokens or DEFAULT_TOKENS)
        return _Forwarded(self, "/v1/chat/completions", fields, body, body.n, self.ignored_headers(ignored))

    async def completions(self, request: Request) -> Any:
        """Handles ``/v1/completions``."""
        given = await self.read(request)
        body, ignored = parse(CompletionBody, given)
        if body.logprobs is not None and self.running.server.program == "llama.cpp":  # its format is that of chats
            raise bad_request(
                "`logprobs` of completions are not there with llama.cpp; chats have them", param="logprobs"
            )
        fields = self._fields(given, body, body.max_tokens)
        answers = body.n * len(body.prompt)
        return _Forwarded(self, "/v1/completions", fields, body, answers, self.ignored_headers(ignored))

    def _fields(self, given: dict[str, Any], body: SamplingFields, max_tokens: int) -> dict[str, Any]:
        """Converts the fields for the other program, whose sampling defaults differ from OpenAI's."""
        program, names = self.running.server.program, self.running.server.names
        if body.model not in names:
            raise model_not_found(body.model, names)
        for name in LACKS[program]:
            if given.get(name):
                raise bad_request(f"`{name}` is not there with {program}; Stoker's own engine has it", param=name)
        fields = {key: value for key, value in given.items() if key in type(body).model_fields and value is not None}
        fields.pop("max_completion_tokens", None)
        penalty = "repeat_penalty" if program == "llama.cpp" else "repetition_penalty"
        fields.pop("repetition_penalty", None)
        fields |= {
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": max(0, body.top_k),
            "min_p": body.min_p,
            "max_tokens": max_tokens,
            penalty: body.repetition_penalty,
        }
        if isinstance(body, ChatBody) and isinstance(body.tool_choice, ChosenTool) and program == "llama.cpp":
            # llama.cpp ignores the name: it requires a call of any of the tools that it gets.
            chosen = body.tool_choice.function.name
            fields["tools"] = [tool for tool in given["tools"] if tool["function"]["name"] == chosen]
            fields["tool_choice"] = "required"
        if isinstance(body, ChatBody) and body.logprobs and program == "llama.cpp":
            fields["top_logprobs"] = requested_alternatives(body.top_logprobs)
        if body.seed is not None and program == "llama.cpp":
            fields["seed"] = body.seed % (2**32 - 1)  # 2**32 - 1 requests a random seed
        return fields

    async def send(self, path: str, fields: dict[str, Any]) -> httpx2.Response:
        """Sends a request and returns the response head after a status check.

        Raises:
            ApiError: the response is an error, or there is none.
        """
        if self._client is None:
            limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64)
            self._client = httpx2.AsyncClient(trust_env=False, timeout=None, limits=limits)
        server = self.running.server
        headers = {"authorization": f"Bearer {server.key}"}
        request = self._client.build_request("POST", self.running.address + path, json=fields, headers=headers)
        with self.failures():
            reply = await self._client.send(request, stream=True)
        if reply.status_code == 200:
            return reply
        message, code = _refusal(await self.content_of(reply))
        raise ApiError(reply.status_code, message or f"{server.program} refused the request", code=code)

    @contextmanager
    def failures(self) -> Iterator[None]:
        """Turns errors of the connection, as when the other program ends, into the API's."""
        try:
            yield
        except httpx2.TransportError as error:
            message = f"{self.running.server.program} does not answer: {type(error).__name__}"
            raise ApiError(503, message, code="engine_failed", retry_after=5) from error

    async def content_of(self, reply: httpx2.Response) -> bytes:
        """Reads a response to its end."""
        try:
            with self.failures():
                return await reply.aread()
        finally:
            await reply.aclose()


def _refusal(content: bytes) -> tuple[str, str | None]:
    """Returns the message of another server's error, and its code in OpenAI's API."""
    try:
        found = json.loads(content)
        error = found.get("error", found)
        return str(error["message"]), "context_length_exceeded" if error.get("type") == TOO_LONG else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return "", None


class _Forwarded:
    """Response to a forwarded request; holds its queue places until it has been sent."""

    def __init__(
        self,
        proxy: Proxy,
        path: str,
        fields: dict[str, Any],
        body: SamplingFields,
        answers: int,
        headers: dict[str, str],
    ) -> None:
        self._proxy, self._path, self._fields, self._body = proxy, path, fields, body
        self._answers, self._headers = answers, headers
        self._is_llamacpp = proxy.running.server.program == "llama.cpp"
        self._alternatives = body.top_logprobs if isinstance(body, ChatBody) else 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        service = self._proxy
        timed = service.metrics.answers.labels(self._body.model, CALLER.get()).time()
        with service.queue.holding(self._answers), timed:
            if self._body.stream:
                await EventStream(self._events(), service.options.seconds, self._headers)(scope, receive, send)
                return
            content = await unless_left(receive, self._whole(), service.options.seconds)
        headers = {**self._headers, "content-type": "application/json"}
        await Response(content, headers=headers)(scope, receive, send)

    async def _events(self) -> AsyncIterator[bytes]:
        reply = await self._proxy.send(self._path, self._fields)
        try:
            with self._proxy.failures():
                parts = reply.aiter_raw()
                async for part in events_as_openai(parts, self._alternatives) if self._is_llamacpp else parts:
                    yield part
        finally:
            await reply.aclose()  # the other server cancels the work of a closed connection

    async def _whole(self) -> bytes:
        content = await self._proxy.content_of(await self._proxy.send(self._path, self._fields))
        answer = json.loads(content)
        usage = answer.get("usage") or {}
        counts, name = self._proxy.metrics, self._body.model
        counts.prompt_tokens.labels(name, CALLER.get()).inc(usage.get("prompt_tokens") or 0)
        counts.answer_tokens.labels(name, CALLER.get()).inc(usage.get("completion_tokens") or 0)
        return json.dumps(as_openai(answer, self._alternatives)).encode() if self._is_llamacpp else content


def serve_behind(running: RunningServer, bound: socket.socket, arguments: argparse.Namespace, token: str | None) -> int:
    """Serves another program's server on a socket until SIGTERM."""
    proxy = Proxy(running, options_of(arguments, token))
    print(f"models: {', '.join(running.server.names)} ({running.server.program})", flush=True)
    serve(proxy.app(), bound, tls=tls_of(arguments), seconds=arguments.timeout, drain=proxy.drain)
    return 0
