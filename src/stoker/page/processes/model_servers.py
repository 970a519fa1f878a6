"""Servers of models that outlive the page: each a detached `stoker serve` with a folder below ``servers/``.

server.json  its models, its address, and the user who started it
token        the page's own token, which may load models and read ``/metrics``
keys         the named keys of its callers, as `stoker keys` writes them
and the files of `stoker.page.processes.detached_process`: process.json, pid.json, out, err, ended.json
"""

from __future__ import annotations

import json
import re
import secrets
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import httpx2
from filelock import FileLock
from starlette.concurrency import run_in_threadpool

from stoker.files import read_file, replace_file
from stoker.page.access.mask_secrets import mask_secrets
from stoker.page.page_error import PageError, bad_request, http_error, not_found, server_error, server_message
from stoker.page.page_settings import PageSettings
from stoker.page.processes.detached_process import DetachedProcess
from stoker.page.processes.run_verb import WITHOUT_TERMINAL, command_of

ID = re.compile(r"[0-9a-f]{16}")
NAME = re.compile(r"\w[\w.:@+-]{0,99}", re.ASCII)  # of a served model
MOST = 16  # maximum number of running servers
LISTENING = re.compile(r"^listening on (\S+)$", re.MULTILINE)
RECORD, TOKEN, KEYS = "server.json", "token", "keys"
STOPPING = 5.0  # seconds that a process which is starting is waited for
LOADING = 300.0  # seconds for an adapter to be loaded


@dataclass(frozen=True)
class ModelServer:
    """A server of models.

    Attributes:
        models: the folder of each served run or adapter, by the name under which it is served.
        port: that it is to listen on; 0 for a free one.
        command: the line that started it.
    """

    id: str
    models: Mapping[str, str]
    host: str
    port: int
    command: str
    user: str
    time: float


@dataclass(frozen=True)
class ModelServers:
    """The servers of a page's folder of state."""

    settings: PageSettings

    def place(self, key: str) -> Path:
        """Returns the folder of a server."""
        return self.settings.state / "servers" / key

    def process(self, server: ModelServer) -> DetachedProcess:
        """Returns the process of a server."""
        return DetachedProcess(self.place(server.id))

    def all(self) -> list[ModelServer]:
        """Returns all servers, the newest first."""
        found = []
        for place in (self.settings.state / "servers").glob("*"):
            with suppress(PageError):
                found.append(self.find(place.name))
        return sorted(found, key=lambda server: -server.time)

    def find(self, key: str) -> ModelServer:
        """Returns the server of an id.

        Raises:
            PageError: there is no such server.
        """
        if ID.fullmatch(key):
            with suppress(OSError, ValueError, TypeError):
                return ModelServer(**json.loads(read_file(self.place(key) / RECORD)))
        raise not_found("there is no server of this id", "GET /api/servers lists them")

    def start(self, models: Mapping[str, str], *, host: str, port: int, user: str) -> ModelServer:
        """Starts a server with separate keys, and returns at once.

        Raises:
            PageError: too many run.
        """
        self._check_room()
        server = ModelServer(
            id=secrets.token_hex(8),
            models=dict(models),
            host=host,
            port=port,
            command="",
            user=user,
            time=round(time.time(), 3),
        )
        place = self.place(server.id)
        place.mkdir(mode=0o700, parents=True)
        for name, text in ((TOKEN, secrets.token_urlsafe(32)), (KEYS, "")):
            (place / name).touch(mode=0o600)
            (place / name).write_text(text)
        return self._begin(server)

    def start_again(self, server: ModelServer, port: int | None = None) -> ModelServer:
        """Starts a server that has ended, with the models and keys that it had.

        Args:
            port: 0 for a free one; None for the one that it had.

        Raises:
            PageError: it runs, has no model left, or too many run.
        """
        process = self.process(server)
        with self._lock(server):
            if process.state in ("starting", "running"):
                raise http_error(409, "the server runs already")
            if not server.models:
                raise http_error(409, "the server has no model any more", "deploy a run on a new one")
            if port is None:
                port = server.port or int((self.address(server) or ":0").rpartition(":")[2])
            self._check_room()
            for name in ("begun.json", "pid.json", "ended.json", "out", "err"):
                (process.folder / name).unlink(missing_ok=True)
            return self._begin(replace(server, port=port))

    def _check_room(self) -> None:
        if sum(self.process(other).state in ("starting", "running") for other in self.all()) >= MOST:
            raise http_error(429, "{n} servers are already running", "stop one of them", n=MOST)

    def _begin(self, server: ModelServer) -> ModelServer:
        place = self.place(server.id)
        words = ["serve", *(f"{name}={path}" for name, path in server.models.items())]
        words += ["--host", server.host] if server.host != "127.0.0.1" else []
        words += ["--port", str(server.port), "--token-file", self.settings.shown(place / TOKEN)]
        words += ["--keys", self.settings.shown(place / KEYS)]
        server = replace(server, command=shlex.join(["stoker", *words]))
        process = self.process(server)
        process.prepare(command_of(words), cwd=self.settings.base, env=WITHOUT_TERMINAL)
        self._keep(server)
        process.start()
        return server

    def process_id(self, server: ModelServer) -> int:
        """Returns the process id of a server that runs.

        Raises:
            PageError: it does not run.
        """
        process, until = self.process(server), time.monotonic() + STOPPING
        while process.state in ("starting", "running"):
            if (found := process.process) is not None:
                return found.pid
            if time.monotonic() > until:
                break
            time.sleep(0.05)  # it is starting, and its process id is not known yet
        raise http_error(409, "the server has ended already")

    def places_aside(self, server: ModelServer) -> tuple[Path, Path]:
        """Returns the folder of a server that has ended, and the one to which it is moved off the list.

        Raises:
            PageError: it runs.
        """
        if self.process(server).state in ("starting", "running"):
            raise http_error(409, "the server runs", "stop it first")
        place = self.place(server.id)
        return place, place.with_name(f"removed-{server.id}")

    def address(self, server: ModelServer) -> str:
        """Returns its address; empty while it loads its models."""
        found = LISTENING.search(self.process(server).output("out")[0])
        return found[1] if found else ""

    def as_json(self, server: ModelServer) -> dict[str, Any]:
        """Converts a server to JSON types."""
        process, place = self.process(server), self.place(server.id)
        address, state = self.address(server), process.state
        status = "running" if address and state == "running" else "starting"
        if state == "lost":
            status = "interrupted"
        elif state == "ended":
            status = "stopped" if process.code == 0 or process.was_stopped else "failed"
        stderr = mask_secrets(process.output("err", offset=-1)[0]).strip().splitlines() if status == "failed" else []
        begun, ended = process.times()
        files = {"token_file": self.settings.shown(place / TOKEN), "keys_file": self.settings.shown(place / KEYS)}
        live = {"address": address if status == "running" else "", "status": status, "begun": begun, "ended": ended}
        live["pid"] = getattr(process.process, "pid", None)
        return {**asdict(server), **live, **files, "error": stderr[-1].removeprefix("error: ")[:500] if stderr else ""}

    def note_loaded(self, server: ModelServer, name: str, path: str) -> None:
        """Records that a model is served, so that it is loaded when the server restarts."""
        with self._lock(server):
            now = self.find(server.id)
            self._keep(replace(now, models={**now.models, name: path}))

    def note_unloaded(self, server: ModelServer, name: str) -> None:
        """Writes down that a model is served no longer."""
        with self._lock(server):
            now = self.find(server.id)
            self._keep(replace(now, models={each: path for each, path in now.models.items() if each != name}))

    def live_address(self, server: ModelServer) -> str:
        """Returns the address of a running server.

        Raises:
            PageError: it does not run, or loads its models.
        """
        address = self.address(server)
        if self.process(server).process is None:  # another process may use the port by now
            raise http_error(409, "the server does not run", "start it again")
        if not address:
            raise http_error(409, "the server is loading its models", retry_after=1)
        return address

    async def ask(self, server: ModelServer, method: str, path: str, body: Any = None) -> httpx2.Response:
        """Returns a server's answer to the page.

        Raises:
            PageError: it does not run, does not answer, or refuses with a reason.
        """
        address = await run_in_threadpool(self.live_address, server)
        headers = {"authorization": f"Bearer {read_file(self.place(server.id) / TOKEN).decode()}"}
        async with httpx2.AsyncClient(base_url=address, timeout=LOADING, trust_env=False, headers=headers) as client:
            try:
                answer = await client.request(method, path, json=body)
            except httpx2.HTTPError as error:
                raise http_error(502, "the server does not answer ({kind})", kind=type(error).__name__) from error
        if answer.status_code >= 400:
            if not (message := server_message(answer.content)):
                raise http_error(502, "the server answered {code}", code=answer.status_code)
            raise server_error(answer.status_code, message)
        return answer

    def curl(self, server: ModelServer, path: str, body: Any = None) -> str:
        """Returns the curl command of a request that the page sends to a server."""
        token = self.settings.line(self.place(server.id) / TOKEN)
        words = f'curl -H "Authorization: Bearer $(cat {token})" {shlex.quote(self.address(server) + path)}'
        if body is None:
            return words
        return f"{words} -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body, ensure_ascii=False))}"

    def _keep(self, server: ModelServer) -> None:
        replace_file(self.place(server.id) / RECORD, json.dumps(asdict(server)))

    def _lock(self, server: ModelServer) -> FileLock:
        return FileLock(self.place(server.id) / ".lock", timeout=10)


def model_name(text: str, taken: Sequence[str] = ()) -> str:
    """Returns the name under which a model is to be served.

    Raises:
        PageError: it can be none, or is taken.
    """
    if not NAME.fullmatch(text):
        raise bad_request(
            "`{name}` cannot be the name of a model", "use letters, digits and . : @ + - _", name=text[:60]
        )
    if text in taken:
        raise http_error(409, "the server has a model {name} already", "give another name", name=text)
    return text
