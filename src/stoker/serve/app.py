"""Routes of the server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from stoker.errors import UserError
from stoker.serve.api_error import ApiError, bad_request, of_user_error
from stoker.serve.endpoint_state import Service
from stoker.serve.guard import RequestGuard, error_response, unless_left
from stoker.serve.metrics import CONTENT_TYPE
from stoker.serve.openai.bodies import CompletionBody, EmbeddingBody, LoadAdapterBody, ScoreBody, UnloadAdapterBody
from stoker.serve.openai.chat_body import ChatBody
from stoker.serve.openai.chat_completions import ChatAnswer, check_calls
from stoker.serve.openai.completions import CompletionAnswer
from stoker.serve.openai.scoring import answer_scores
from stoker.serve.openai.sse import EventStream
from stoker.serve.openai.text_embeddings import embeddings
from stoker.serve.request_body import B, parse
from stoker.serve.served_models.load_adapter import load_adapter, unload_adapter
from stoker.serve.served_models.served import Served
from stoker.serve.server_state import ServerState

Answer = Callable[[Service, Served, Any], Coroutine[Any, Any, Any]]


def app_of(service: Service) -> ASGIApp:
    """Returns the ASGI application of a server."""
    endpoints = _Endpoints(service)
    routes = [
        Route("/v1/models", endpoints.models, methods=["GET"]),
        Route("/v1/models/{name:path}", endpoints.model, methods=["GET"]),
        Route("/v1/chat/completions", endpoints.chat, methods=["POST"]),
        Route("/v1/completions", endpoints.completions, methods=["POST"]),
        Route("/v1/embeddings", endpoints.embeddings, methods=["POST"]),
        Route("/v1/score", endpoints.score, methods=["POST"]),
        Route("/v1/load_lora_adapter", endpoints.load_adapter, methods=["POST"]),
        Route("/v1/unload_lora_adapter", endpoints.unload_adapter, methods=["POST"]),
    ]
    return guarded(service, routes)


class _Endpoints:
    """Functions of the routes."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def _parsed(self, kind: type[B], request: Request) -> tuple[B, list[str]]:
        """Parses a body outside of the event loop, as it may hold millions of ids."""
        return await asyncio.to_thread(parse, kind, await self._service.read(request))

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [served.as_json() for served in self._service.models]})

    async def model(self, request: Request) -> Response:
        return JSONResponse(self._service.models.find(request.path_params["name"]).as_json())

    async def chat(self, request: Request) -> Any:
        body, ignored = await self._parsed(ChatBody, request)
        check_calls(body)
        return _Answering(self._service, request, body, ignored, ChatAnswer, body.n)

    async def completions(self, request: Request) -> Any:
        body, ignored = await self._parsed(CompletionBody, request)
        return _Answering(self._service, request, body, ignored, CompletionAnswer, body.n * len(body.prompt))

    async def embeddings(self, request: Request) -> Response:
        return await self._computed(request, EmbeddingBody, embeddings)

    async def score(self, request: Request) -> Response:
        return await self._computed(request, ScoreBody, answer_scores)

    async def _computed(self, request: Request, kind: Any, answer: Answer) -> Response:
        """Returns the result of a single computation."""
        service = self._service
        body, ignored = await self._parsed(kind, request)
        with service.using(body.model) as served, service.queue.holding(1):
            found = await unless_left(request.receive, answer(service, served, body), service.options.seconds)
        return JSONResponse(found, headers=service.ignored_headers(ignored))

    async def load_adapter(self, request: Request) -> Response:
        body, _ = await self._parsed(LoadAdapterBody, request)
        served = await load_adapter(self._service, body.lora_name, body.lora_path, body.base_model_name)
        return JSONResponse(served.as_json())

    async def unload_adapter(self, request: Request) -> Response:
        body, _ = await self._parsed(UnloadAdapterBody, request)
        await unload_adapter(self._service, body.lora_name)
        return JSONResponse({"id": body.lora_name, "object": "model", "deleted": True})


def guarded(service: ServerState, routes: list[Route]) -> ASGIApp:
    """Returns an application with these routes, ``/health``, ``/metrics``, OpenAI's error format, and the guard."""

    async def health(_: Request) -> Response:
        if service.draining or not service.alive:
            return JSONResponse({"status": "draining" if service.draining else "failed"}, 503)
        return JSONResponse({"status": "ok"})

    async def metrics(_: Request) -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)

    routes = [Route("/health", health, methods=["GET"]), Route("/metrics", metrics, methods=["GET"]), *routes]

    async def of_http(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message, headers = error.detail, error.headers or {}
        if error.status_code == 404:
            message = f"there is no such path; the paths are {', '.join(route.path for route in routes)}"
        elif error.status_code == 405:
            message = f"this path takes {headers['Allow']}"
        response = error_response(ApiError(error.status_code, message))
        response.headers.update(headers)
        return response

    async def of_api(_: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error_response(error)

    async def of_user(_: Request, error: Exception) -> Response:
        assert isinstance(error, UserError)
        return error_response(of_user_error(error))

    async def of_bug(_: Request, error: Exception) -> Response:
        return error_response(ApiError(500, f"the server failed: {type(error).__name__}"))

    handlers: dict[Any, Any] = {HTTPException: of_http, ApiError: of_api, UserError: of_user, Exception: of_bug}
    inner = Starlette(routes=routes, exception_handlers=handlers)
    return RequestGuard(inner, service.options, service.metrics, frozenset(route.path for route in routes))


class _Answering:
    """Response to a generation request; holds its model and its queue places until it has been sent."""

    def __init__(
        self, service: Service, request: Request, body: Any, ignored: list[str], kind: Any, answers: int
    ) -> None:
        self.service, self.request, self.body, self.kind, self.answers = service, request, body, kind, answers
        self.ignored = ignored

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        service, seconds = self.service, self.service.options.seconds
        with service.using(self.body.model) as served, service.queue.holding(self.answers):
            if served.scores is not None:
                raise bad_request(f"{served.name} scores answers and writes none: POST /v1/score", param="model")
            answer = self.kind(service, served, self.body)
            unread = await unless_left(receive, answer.unread(), seconds)
            headers = service.ignored_headers([*self.ignored, *unread])
            if self.body.stream:
                await EventStream(answer.events(), seconds, headers)(scope, receive, send)
                return
            found = await unless_left(receive, answer.whole(), seconds)
        await JSONResponse(found, headers=headers)(scope, receive, send)
