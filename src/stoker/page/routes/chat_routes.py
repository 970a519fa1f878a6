"""Routes of the chat with a run."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx2
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from stoker.page.access.guard import account_of
from stoker.page.access.job_paths import document_of, path_problems, refuse
from stoker.page.page_error import PageError, bad_request, http_error
from stoker.page.processes.chat_servers import ChatServers
from stoker.page.request_values import number_of, read_object, text_of
from stoker.page.routing import Page, route, stream
from stoker.page.run_data.run_view import newest_saved, read_job
from stoker.runs.run_folder import RunFolder

ROLES = ("system", "user", "assistant")
MOST_MESSAGES, MOST_TOKENS = 1000, 8192
HOTTEST = 2.0  # as `stoker serve` accepts


@dataclass(frozen=True)
class ServedRun:
    """A run as the servers of the page's own take it.

    Attributes:
        path: of its folder, as `stoker serve` is given it.
        name: under which it is served.
        weights: see `newest_weights`.
    """

    folder: RunFolder
    path: str
    name: str
    weights: str


def served_run(page: Page, key: str) -> ServedRun:
    """Returns the run of an id, whose job may be opened.

    Raises:
        PageError: there is no such run, or its job reaches out of the page's folders or runs code.
    """
    folder = page.runs.find(key)
    refuse(path_problems(document_of(read_job(folder)), page.settings, None, scores=False))
    path = page.settings.shown(folder.path)
    name = re.sub(r"[^\w.-]+", "-", folder.path.name)
    return ServedRun(folder, path if "/" in path else f"./{path}", name, newest_weights(page.views.events(folder)))


def chat_routes(page: Page, servers: ChatServers) -> list[Route]:
    """Returns the routes of the chat."""
    own = _ChatRoutes(page, servers)
    return [route("/api/chat", own.chat, method="POST", role="run")]


@dataclass(frozen=True)
class _ChatRoutes:
    page: Page
    servers: ChatServers

    async def chat(self, request: Request) -> Response:
        """Streams a run's answer."""
        body = await read_object(request)
        run = await run_in_threadpool(served_run, self.page, text_of(body, "run", most=200))
        adapter = body.get("adapter", True)
        if not isinstance(adapter, bool):
            raise bad_request("`adapter` must be true or false")
        messages = _messages(body)
        temperature = body.get("temperature", 0)
        if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not 0 <= temperature <= HOTTEST:
            raise bad_request("`temperature` must be a number from 0 to {most}", most=HOTTEST)
        most = number_of(body, "max_tokens", default=256, least=1, most=MOST_TOKENS)
        self.page.audit.write(account_of(request, "run").name, "chat", run=str(run.folder.path))
        answers = self.servers.answer(
            run.path,
            run.name,
            adapter=adapter,
            messages=messages,
            weights=run.weights,
            temperature=temperature,
            max_tokens=most,
        )
        return stream(_events(answers))


def newest_weights(events: list[dict[str, Any]]) -> str:
    """Returns an identifier of a run's newest checkpoint, from its events; runs with one name have different ones."""
    began = next((event.get("time") for event in events if event.get("event") == "started"), None)
    saved = newest_saved(events)
    return str(began) if saved is None else f"{began} {saved.get('step')} {saved.get('time')}"


async def _events(answers: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    """Streams the pieces of an answer as events; an error is the last of them."""
    try:
        async for piece in answers:
            yield _event(piece)
    except PageError as error:
        yield _event(error.as_json())
    except httpx2.HTTPError as error:  # the model's process has ended
        hint = "send it again: the model is loaded again"
        stopped = http_error(502, "the model has stopped answering ({kind})", hint, kind=type(error).__name__)
        yield _event(stopped.as_json())


def _event(value: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n".encode()


def _messages(body: dict[str, Any]) -> list[dict[str, str]]:
    """Returns the turns of a conversation, after the optional system message.

    Raises:
        PageError: the value is not a list of turns.
    """
    given = body.get("messages")
    if not isinstance(given, list) or not 0 < len(given) <= MOST_MESSAGES:
        raise bad_request("`messages` must be a list of turns", "[{role: user, content: ...}]")
    turns = []
    for each in given:
        if not isinstance(each, dict) or each.get("role") not in ROLES:
            raise bad_request("`{key}` must be one of {known}", key="role", known=", ".join(ROLES))
        turns.append({"role": str(each["role"]), "content": text_of(each, "content")})
    system = text_of(body, "system", default="")
    return [{"role": "system", "content": system}, *turns] if system else turns
