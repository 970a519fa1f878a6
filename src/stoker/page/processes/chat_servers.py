"""Servers of models for the page's chat: one `stoker serve` for each run in use, ended when it is idle."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from stoker.page.page_error import PageError, bad_request, http_error, passed_on, server_error, server_message
from stoker.page.processes.run_verb import WITHOUT_TERMINAL, command_of

MOST = 3  # models in memory
IDLE = 600.0  # seconds after which a model leaves memory
LOOK_EVERY = 5.0
LOADING = 600.0  # seconds for a model to be loaded
SIGN = 2.0  # seconds between two progress events while loading
ANSWER = 600.0  # timeout in seconds of one answer
LISTENING = "listening on "
CHATLESS = "no chat template"


@dataclass
class ChatServer:
    """A server of one run, or of one model.

    Attributes:
        url: its address; empty while it loads.
        models: the names that it answers to, the run's own first.
        answers: number of answers in progress.
        weights: the checkpoint of the run that it has loaded.
    """

    process: asyncio.subprocess.Process
    token: str
    ready: asyncio.Task[None] | None = None
    url: str = ""
    models: list[str] = field(default_factory=list)
    used: float = field(default_factory=time.monotonic)
    answers: int = 0
    errors: Path | None = None
    weights: str = ""

    def end(self) -> None:
        """Ends it; see `stoker.page.processes.end_with_parent`."""
        if self.process.stdin is not None:
            self.process.stdin.close()


class ChatServers:
    """The running servers, by the run or model that they serve."""

    def __init__(self, base: Path, state: Path) -> None:
        self._base, self._state = base, state
        self._servers: dict[str, ChatServer] = {}
        self._watch: asyncio.Task[None] | None = None
        self._beginning = asyncio.Lock()  # two concurrent requests start one server

    async def answer(
        self,
        served: str,
        name: str,
        *,
        adapter: bool,
        messages: list[dict[str, str]],
        weights: str = "",
        **options: Any,
    ) -> AsyncIterator[dict[str, Any]]:
        """Yields ``{"status": "loading"}`` while a model is loaded, ``{"text"}`` as it answers, and ``{"done"}``.

        Args:
            served: the folder of a run, or a model.
            name: under which it is served.
            adapter: whether the run's adapter is used, if it has one.
            weights: which are the newest now; a server that has read others ends, once it has answered.
            options: of OpenAI's API.

        Raises:
            PageError: the model cannot be loaded, or refuses the messages.
        """
        async with self._using(served, name, weights) as server:
            assert server.ready is not None
            while not server.ready.done():
                yield {"status": "loading"}
                await asyncio.wait({server.ready}, timeout=SIGN)
            server.ready.result()
            model = server.models[0]
            if not adapter:
                if len(server.models) < 2:
                    raise bad_request("{run} has no adapter to switch off", "chat with its model instead", run=name)
                model = next(each for each in server.models if each != name)
            async for piece in self._ask(server, model, messages, options):
                yield piece

    async def scores(self, served: str, name: str, rows: list[dict[str, Any]], *, weights: str = "") -> dict[str, Any]:
        """Returns a ranking model's scores of rows, each with its number of known ids; arguments as for `answer`.

        Raises:
            PageError: the model cannot be loaded, or refuses a row.
        """
        async with self._using(served, name, weights) as server:
            assert server.ready is not None
            await asyncio.shield(server.ready)
            headers = {"authorization": f"Bearer {server.token}"}
            body = {"model": server.models[0], "rows": rows, "lookups": True}
            client = httpx2.AsyncClient(base_url=server.url, timeout=ANSWER, trust_env=False, headers=headers)
            async with client:
                answer = await client.post("/v1/score", json=body)
            if answer.status_code != 200:
                raise _refusal(answer.status_code, server_message(answer.content))
            found: dict[str, Any] = answer.json()
            return found | {"ignored": answer.headers.get("x-stoker-ignored", "")}

    @asynccontextmanager
    async def _using(self, served: str, name: str, weights: str) -> AsyncIterator[ChatServer]:
        """A server that is not ended within the block."""
        async with self._beginning:
            server = await self._server(served, name, weights)
            server.answers += 1
        try:
            yield server
        finally:
            server.answers -= 1
            server.used = time.monotonic()

    async def _ask(
        self, server: ChatServer, model: str, messages: list[dict[str, str]], options: dict[str, Any]
    ) -> AsyncIterator[dict[str, Any]]:
        begin, pieces = time.monotonic(), 0
        headers = {"authorization": f"Bearer {server.token}"}
        body = {"model": model, "stream": True, **options}
        ways = (
            ("/v1/chat/completions", {"messages": messages}),
            ("/v1/completions", {"prompt": messages[-1]["content"]}),  # of a model that only continues texts
        )
        async with httpx2.AsyncClient(base_url=server.url, timeout=ANSWER, trust_env=False, headers=headers) as client:
            for path, asked in ways:
                async with client.stream("POST", path, json={**body, **asked}) as response:
                    if response.status_code != 200:
                        message = server_message(await response.aread())
                        if CHATLESS in message and path == ways[0][0]:
                            continue
                        raise _refusal(response.status_code, message)
                    async for line in response.aiter_lines():
                        text = _text_of(line)
                        if text:
                            pieces += 1
                            yield {"text": text}
                    yield {"done": True, "seconds": round(time.monotonic() - begin, 3), "pieces": pieces}
                    return

    async def _server(self, served: str, name: str, weights: str) -> ChatServer:
        server = self._servers.get(served)
        if server is not None:
            if server.process.returncode is None and (server.answers or server.weights == weights):
                return server
            self._servers.pop(served).end()
        while len(self._servers) >= MOST:
            idle = [key for key, each in self._servers.items() if not each.answers]
            if not idle:
                raise http_error(429, "{n} models are already loaded for chat", retry_after=10, n=MOST)
            self._servers.pop(min(idle, key=lambda key: self._servers[key].used)).end()
        folder = self._state / "chat"
        folder.mkdir(mode=0o700, exist_ok=True)
        token, number = secrets.token_urlsafe(24), secrets.token_hex(8)
        secret, errors = folder / f"{number}.token", folder / f"{number}.err"
        secret.touch(mode=0o600)
        secret.write_text(token)
        words = ["serve", f"{name}={served}", "--port", "0", "--token-file", str(secret), "--queue", "8"]
        with errors.open("wb") as file:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "stoker.page.processes.end_with_parent", *command_of(words)),
                cwd=self._base,
                env={**os.environ, **WITHOUT_TERMINAL},
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=file,
                start_new_session=True,
            )
        server = self._servers[served] = ChatServer(process, token, errors=errors, weights=weights)
        server.ready = asyncio.create_task(self._loaded(server, served, secret))
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._end_idle())
        return server

    async def _loaded(self, server: ChatServer, served: str, secret: Path) -> None:
        """Waits until a server listens.

        Raises:
            PageError: it does not.
        """
        assert server.process.stdout is not None and server.errors is not None
        try:
            async with asyncio.timeout(LOADING):
                while line := (await server.process.stdout.readline()).decode("utf-8", "replace"):
                    if line.startswith("models: "):
                        server.models = [each.strip() for each in line.removeprefix("models: ").split(",")]
                    if line.startswith(LISTENING):
                        server.url = line.removeprefix(LISTENING).strip()
                        return
        except TimeoutError:
            pass
        finally:
            secret.unlink(missing_ok=True)
            if not server.url:
                if self._servers.get(served) is server:
                    del self._servers[served]
                server.end()
        if lines := server.errors.read_text(errors="replace").strip().splitlines():
            raise passed_on(400, lines[-1].removeprefix("error: "))
        raise bad_request("the model was not loaded in time")

    async def _end_idle(self) -> None:
        while self._servers:
            await asyncio.sleep(LOOK_EVERY)
            for key, server in list(self._servers.items()):
                is_idle = not server.answers and time.monotonic() - server.used > IDLE
                if is_idle or server.process.returncode is not None:
                    self._servers.pop(key).end()


def clean_up(state: Path) -> None:
    """Removes files that servers of an earlier page left behind."""
    for path in (state / "chat").glob("*.*"):
        if path.suffix in (".token", ".err"):
            path.unlink(missing_ok=True)


def _refusal(status: int, message: str) -> PageError:
    """Returns the error of a model's server, with its message if it has one."""
    if not message:
        return http_error(502, "the server of the model failed")
    return server_error(status, message)


def _text_of(line: str) -> str:
    """Returns the text that a line of the stream adds."""
    if not line.startswith("data: {"):
        return ""
    found = json.loads(line.removeprefix("data: "))
    if "error" in found:
        raise _refusal(502, str(found["error"].get("message", "")))
    choice = (found.get("choices") or [{}])[0]
    text = choice.get("text") if "text" in choice else (choice.get("delta") or {}).get("content")
    return text or ""
