"""Routes of login, logout and the current user."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from stoker.page.access.accounts import LOCAL, OWNER, ROLES, Session
from stoker.page.access.guard import account_of, cookie_name
from stoker.page.page_error import bad_request, http_error, not_found
from stoker.page.page_settings import SESSION_SECONDS
from stoker.page.request_values import read_object, text_of
from stoker.page.routing import Page, in_thread, json_response, route
from stoker.serve.named_keys import NAME, add_key, change_role, check_new_name, remove_key

TRIES, WITHIN = 10, 60.0  # wrong tokens, seconds


def account_routes(page: Page) -> list[Route]:
    """Returns the routes of users."""
    own = _AccountRoutes(page)
    return [
        route("/api/me", own.me),
        route("/api/login", own.login, method="POST", role=""),
        route("/api/logout", own.logout, method="POST"),
        route("/api/audit-log", in_thread(own.audit_log), role="admin"),
        route("/api/script", in_thread(own.script)),
        route("/api/users", in_thread(own.users), role="admin"),
        route("/api/users", own.add_user, method="POST", role="admin"),
        route("/api/users/{name}", own.change_user, method="PATCH", role="admin"),
        route("/api/users/{name}", in_thread(own.remove_user), method="DELETE", role="admin"),
    ]


class _AccountRoutes:
    def __init__(self, page: Page) -> None:
        self.page = page
        self._changing = threading.Lock()
        self._wrong: dict[str, deque[float]] = {}  # times of wrong tokens, by the address that sent them

    async def me(self, request: Request) -> Any:
        """Returns the current user; begins the session of a page that has no token."""
        session: Session | None = request.state.session
        account = account_of(request)
        cookie = ""
        if session is None:
            session, cookie = self.page.accounts.begin(account)
        settings = self.page.settings
        response = json_response(
            {
                "name": account.name,
                "role": account.role,
                "csrf": self.page.accounts.csrf_of(session),
                "until": session.until,
                "login": settings.demands_login,
                "users": settings.users is not None,
                "version": version("stoker"),
                "runs_folders": [str(folder) for folder in settings.runs],
                "first_time": not self.page.runs.all() and not self.page.queue.entries(),
            }
        )
        return self._with_cookie(response, cookie) if cookie else response

    async def login(self, request: Request) -> Any:
        """Begins a session for the user of a token."""
        token = text_of(await read_object(request), "token", most=4096)
        now = time.monotonic()  # from here on nothing waits, so that requests sent together are counted one by one
        self._wrong = {place: times for place, times in self._wrong.items() if now - times[-1] < WITHIN}
        address = request.client.host if request.client is not None else ""
        times: Sequence[float] = self._wrong.get(address, ())
        if len(times) == TRIES and now - times[0] < WITHIN:
            raise http_error(429, "too many wrong tokens", retry_after=int(WITHIN))
        account = self.page.accounts.of_token(token)
        if account is None:
            self._wrong.setdefault(address, deque(maxlen=TRIES)).append(now)
            self.page.audit.write("", "login refused")
            raise http_error(401, "unknown token")
        session, cookie = self.page.accounts.begin(account)
        self.page.audit.write(account.name, "login")
        body = {"name": account.name, "role": account.role, "csrf": self.page.accounts.csrf_of(session)}
        return self._with_cookie(json_response(body), cookie)

    async def logout(self, request: Request) -> Any:
        """Ends the session."""
        session: Session = request.state.session
        self.page.audit.write(session.account.name, "logout")
        self.page.accounts.end(session)
        response = json_response({})
        response.delete_cookie(cookie_name(self.page.settings), path="/", httponly=True, samesite="strict")
        return response

    def audit_log(self, _: Request) -> Any:
        """Returns the audit log, the newest first."""
        return {"lines": list(self.page.audit.lines())[::-1][:1000]}

    def script(self, request: Request) -> Any:
        """Returns the actions so far as a shell script."""
        account = account_of(request)
        text = self.page.audit.script(self.page.settings.base, "" if account.may("admin") else account.name)
        return Response(text, media_type="text/x-shellscript; charset=utf-8")

    def users(self, _: Request) -> Any:
        """Returns the users and their roles."""
        users = [{"name": each.name, "role": each.role} for each in self.page.accounts.all()]
        file = self.page.settings.users
        shown = "" if file is None else self.page.settings.shown(file)
        return {"users": users, "editable": file is not None, "file": shown}

    async def add_user(self, request: Request) -> Any:
        """Makes a user; the token is in this answer alone."""
        body = await read_object(request)
        name, role = text_of(body, "name"), _role(body)
        if name in (LOCAL, OWNER) or not NAME.fullmatch(name):
            hint = "use letters, digits and . _ @ -"
            raise bad_request("{name} cannot be the name of a user", hint, name=name[:80])
        file = self._users_file()
        command = self.page.settings.line("stoker", "keys", file, "--add", name, "--role", role)
        await run_in_threadpool(check_new_name, file, name, ROLES)
        self.page.audit.write(account_of(request, "admin").name, "add user", command=command, of=name, role=role)
        token = await run_in_threadpool(add_key, file, name, role, ROLES)
        return {"name": name, "role": role, "token": token, "command": command}

    async def change_user(self, request: Request) -> Any:
        """Changes a user's role."""
        role = _role(await read_object(request))
        return await run_in_threadpool(self._change, request, role)

    def remove_user(self, request: Request) -> Any:
        """Removes a user and ends their sessions."""
        return self._change(request, "")

    def _change(self, request: Request, role: str) -> Any:
        """Changes a user's role, or removes the user if the role is empty. At least one admin must remain."""
        account, name, file = account_of(request, "admin"), request.path_params["name"], self._users_file()
        with self._changing:
            users = self.page.accounts.all()
            if not any(each.name == name for each in users):
                raise not_found("there is no user {name}", "GET /api/users lists them", name=name[:64])
            if role != "admin" and not any(each.role == "admin" and each.name != name for each in users):
                raise http_error(409, "{name} is the only admin", "make another user an admin first", name=name)
            words = ["--change", name, "--role", role] if role else ["--remove", name]
            command = self.page.settings.line("stoker", "keys", file, *words)
            action = "change user" if role else "remove user"
            self.page.audit.write(account.name, action, command=command, of=name, role=role)
            if role:
                change_role(file, name, role, ROLES)
            else:
                remove_key(file, name, ROLES)
        return {"command": command}

    def _users_file(self) -> Path:
        file = self.page.settings.users
        if file is None:
            raise http_error(409, "this page has no file of users", "start it with --users FILE; see `stoker keys`")
        return file

    def _with_cookie(self, response: Response, cookie: str) -> Response:
        settings = self.page.settings
        response.set_cookie(
            cookie_name(settings),
            cookie,
            max_age=SESSION_SECONDS,
            path="/",
            httponly=True,
            samesite="strict",
            secure=settings.secure,
        )
        return response


def _role(body: dict[str, Any]) -> str:
    role = text_of(body, "role", most=20)
    if role not in ROLES:
        raise bad_request("`{key}` must be one of {known}", key="role", known=", ".join(ROLES))
    return role
