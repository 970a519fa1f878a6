"""Routes of model servers: deploying and retiring runs and adapters, keys, traffic."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.routing import Route

from stoker.files import read_file
from stoker.page.access.guard import account_of
from stoker.page.access.job_paths import allowed_folders, document_of, is_inside, path_problems, place_problem, refuse
from stoker.page.access.mask_secrets import mask_secrets
from stoker.page.page_error import bad_request, http_error, not_found
from stoker.page.processes.model_servers import KEYS, ModelServer, ModelServers, model_name
from stoker.page.processes.server_traffic import traffic_of
from stoker.page.request_values import number_of, read_object, text_of
from stoker.page.routing import Page, in_thread, route
from stoker.page.run_data.run_view import read_job
from stoker.runs.run_folder import RunFolder
from stoker.serve.named_keys import ADMIN, ASK, SERVER_ROLES, add_key, check_new_name, read_keys, remove_key
from stoker.serve.served_models.adapter_config import CONFIG
from stoker.serve.server_options import is_loopback
from stoker.sockets import LAST_PORT

HOST = re.compile(r"[A-Za-z0-9:\[][\w.:\[\]-]*")
LARGEST_CONFIG = 1 << 20  # bytes of an adapter's configuration
LOG = 64 << 10  # bytes of a server's log in one answer


def server_routes(page: Page) -> list[Route]:
    """Returns the routes of servers of models."""
    own = _ServerRoutes(page, ModelServers(page.settings))
    one = "/api/servers/{id}"
    return [
        route("/api/servers", in_thread(own.all)),
        route("/api/servers", own.start, method="POST", role="run"),
        route(one, in_thread(own.one)),
        route(one, in_thread(own.put_aside), method="DELETE", role="run"),
        route(f"{one}/start", own.start_again, method="POST", role="run"),
        route(f"{one}/stop", in_thread(own.stop), method="POST", role="run"),
        route(f"{one}/models", own.models),
        route(f"{one}/models", own.load, method="POST", role="run"),
        route(f"{one}/models/{{name}}", own.unload, method="DELETE", role="run"),
        route(f"{one}/keys", in_thread(own.keys)),
        route(f"{one}/keys", own.add_key, method="POST", role="run"),
        route(f"{one}/keys/{{name}}", in_thread(own.remove_key), method="DELETE", role="run"),
        route(f"{one}/traffic", own.traffic),
    ]


@dataclass(frozen=True)
class _ServerRoutes:
    page: Page
    servers: ModelServers

    def _server(self, request: Request) -> ModelServer:
        return self.servers.find(request.path_params["id"])

    def all(self, _: Request) -> Any:
        """Returns the servers, the newest first."""
        return {"servers": [self.servers.as_json(server) for server in self.servers.all()]}

    def one(self, request: Request) -> Any:
        """Returns a server, and the end of its log."""
        server = self._server(request)
        log, _ = self.servers.process(server).output("err", offset=-1, most=LOG)
        return {**self.servers.as_json(server), "log": mask_secrets(log)}

    async def start(self, request: Request) -> Any:
        """Starts a server of a run or of an adapter's folder, which outlives the page."""
        body = await read_object(request)
        host = text_of(body, "host", default="127.0.0.1", most=200)
        if not HOST.fullmatch(host):
            raise bad_request("`host` must be an address or a name of this machine")
        account = account_of(request, "run" if is_loopback(host) else "admin")
        port = _port(body, default=0)
        path, name = await run_in_threadpool(self._asked, body)
        server = await run_in_threadpool(
            lambda: self.servers.start({model_name(name): path}, host=host, port=port, user=account.name)
        )
        self.page.audit.write(account.name, "start server", command=server.command, id=server.id)
        return {"id": server.id, "command": server.command}

    async def start_again(self, request: Request) -> Any:
        """Starts a server that has ended, with the models and keys that it had, on its port or another one."""
        body = await read_object(request)
        port = _port(body) if "port" in body else None
        return await run_in_threadpool(self._start_again, request, port)

    def _start_again(self, request: Request, port: int | None) -> Any:
        server = self._server(request)
        account = account_of(request, "run" if is_loopback(server.host) else "admin")
        for path in server.models.values():
            self._check(self.page.settings.base / path)
        server = self.servers.start_again(server, port)
        self.page.audit.write(account.name, "start server", command=server.command, id=server.id)
        return {"id": server.id, "command": server.command}

    def stop(self, request: Request) -> Any:
        """Asks a server to end after its pending requests."""
        server = self._server(request)
        command = f"kill {self.servers.process_id(server)}"
        self.page.audit.write(account_of(request, "run").name, "stop server", command=command, id=server.id)
        self.servers.process(server).stop()
        return {"command": command}

    def put_aside(self, request: Request) -> Any:
        """Takes a server that has ended off the list."""
        server = self._server(request)
        place, aside = self.servers.places_aside(server)
        command = self.page.settings.line("mv", place, aside)
        self.page.audit.write(account_of(request, "run").name, "remove server", command=command, id=server.id)
        place.rename(aside)
        return {"command": command}

    async def models(self, request: Request) -> Any:
        """Returns the models that a server answers for, with the base and the folder of each adapter."""
        server = await run_in_threadpool(self._server, request)
        found = (await self.servers.ask(server, "GET", "/v1/models")).json()["data"]
        rows = [
            {"name": each["id"], "parent": each.get("parent"), "path": server.models.get(each["id"], "")}
            | {key: each[key] for key in ("columns", "labels", "step", "scores") if key in each}
            for each in found
        ]
        return {"models": rows, "command": self.servers.curl(server, "/v1/models")}

    async def load(self, request: Request) -> Any:
        """Serves the adapter of a run or a folder on a running server, in addition to its models."""
        body = await read_object(request)
        server = await run_in_threadpool(self._server, request)
        path, name = await run_in_threadpool(self._asked, body)
        asked = {"lora_name": model_name(name, tuple(server.models)), "lora_path": str(self.page.settings.base / path)}
        command = await run_in_threadpool(self.servers.curl, server, "/v1/load_lora_adapter", asked)
        self.page.audit.write(account_of(request, "run").name, "load model", command=command, id=server.id, of=path)
        await self.servers.ask(server, "POST", "/v1/load_lora_adapter", asked)
        await run_in_threadpool(self.servers.note_loaded, server, name, path)
        return {"command": command}

    async def unload(self, request: Request) -> Any:
        """Serves an adapter no longer, once the requests that use it have ended."""
        server = await run_in_threadpool(self._server, request)
        name = request.path_params["name"]
        asked = {"lora_name": name}
        command = await run_in_threadpool(self.servers.curl, server, "/v1/unload_lora_adapter", asked)
        self.page.audit.write(account_of(request, "run").name, "unload model", command=command, id=server.id, of=name)
        await self.servers.ask(server, "POST", "/v1/unload_lora_adapter", asked)
        await run_in_threadpool(self.servers.note_unloaded, server, name)
        return {"command": command}

    def keys(self, request: Request) -> Any:
        """Returns the names and roles of a server's keys."""
        file = self.servers.place(self._server(request).id) / KEYS
        found = read_keys(file, SERVER_ROLES, option="--keys")
        return {"keys": [{"name": key.name, "role": key.role} for key in found], "command": self._keys_line(file)}

    async def add_key(self, request: Request) -> Any:
        """Makes a key, which is in this answer alone."""
        body = await read_object(request)
        server = await run_in_threadpool(self._server, request)
        name, role = text_of(body, "name", most=64), text_of(body, "role", default=ASK, most=20)
        if role not in SERVER_ROLES:
            raise bad_request("`{key}` must be one of {known}", key="role", known=", ".join(SERVER_ROLES))
        account = account_of(request, "admin" if role == ADMIN else "run")  # one loads any folder of adapters
        file = self.servers.place(server.id) / KEYS
        command = self._keys_line(file, "--add", name, "--role", role)
        await run_in_threadpool(check_new_name, file, name, SERVER_ROLES)
        self.page.audit.write(account.name, "add key", command=command, id=server.id, of=name, role=role)
        key = await run_in_threadpool(add_key, file, name, role, SERVER_ROLES)
        return {"name": name, "role": role, "key": key, "command": command}

    def remove_key(self, request: Request) -> Any:
        """Takes a key out, which the server refuses from its next request on."""
        server, name = self._server(request), request.path_params["name"]
        file = self.servers.place(server.id) / KEYS
        if all(key.name != name for key in read_keys(file, SERVER_ROLES, option="--keys")):
            raise not_found("the server has no key {name}", "GET /api/servers/ID/keys lists them", name=name[:64])
        command = self._keys_line(file, "--remove", name)
        self.page.audit.write(account_of(request, "run").name, "remove key", command=command, id=server.id, of=name)
        remove_key(file, name, SERVER_ROLES)
        return {"command": command}

    async def traffic(self, request: Request) -> Any:
        """Requests, tokens and times by model and key since the server was started."""
        server = await run_in_threadpool(self._server, request)
        answer = await self.servers.ask(server, "GET", "/metrics")
        return {**traffic_of(answer.text), "command": self.servers.curl(server, "/metrics")}

    def _keys_line(self, file: Path, *words: str) -> str:
        return self.page.settings.line("stoker", "keys", file, *words)

    def _asked(self, body: dict[str, Any]) -> tuple[str, str]:
        """Returns the folder to be served, and its name."""
        base = self.page.settings.base
        if "path" in body:
            given = text_of(body, "path", most=4096)
            folder = base / given
            if ".." in Path(given).parts or given.startswith("~") or not given.isprintable():
                raise bad_request("`path` must be a folder of runs or exports")
        else:
            folder = self.page.runs.find(text_of(body, "run", most=200)).path
        self._check(folder)
        name = text_of(body, "name", default="", most=200) or folder.name
        return self.page.settings.shown(folder), name

    def _check(self, folder: Path) -> None:
        """Refuses a folder outside of the page's, or a run whose job reaches out of them or runs code.

        Raises:
            PageError: the folder is outside of the page's folders.
        """
        settings = self.page.settings
        if not is_inside(folder, allowed_folders(settings)) or not folder.is_dir():
            raise http_error(403, "`{text}` is not a folder that this page may use", text=folder.name[:80])
        run, adapter = RunFolder(folder), folder / CONFIG
        if os.path.lexists(run.job):
            refuse(path_problems(document_of(read_job(run)), settings, None, scores=False))
            return
        problem = place_problem(str(folder), settings.base, allowed_folders(settings))
        refuse([problem] if problem else [])
        if adapter.is_file():
            text = read_file(adapter)[:LARGEST_CONFIG].decode("utf-8", "replace")
            refuse(path_problems(document_of(text, CONFIG), settings, None))  # it names a base, and JSON is YAML


def _port(body: dict[str, Any], default: int | None = None) -> int:
    port = number_of(body, "port", default=default, most=LAST_PORT)
    if 0 < port < 1024:
        raise bad_request("`port` must be 0 (any free port) or at least 1024")
    return port
