"""Checks every request first: its host, its session, its role, and its origin."""

from __future__ import annotations

import hmac

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stoker.errors import UserError
from stoker.json_values import finite
from stoker.page.access.accounts import Account, Accounts, Session
from stoker.page.page_error import PageError, http_error, of_user_error
from stoker.page.page_settings import PageSettings
from stoker.serve.server_options import host_of, is_loopback

API = "/api/"
OPEN = ("/api/login",)  # answered without a session
CSRF = "x-stoker-csrf"
CHANGES = ("POST", "PATCH", "PUT", "DELETE")
HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'self'; "
        b"frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), microphone=(), geolocation=()"),
)


class PageGuard:
    """ASGI middleware that refuses forbidden requests, and adds the headers that protect the page."""

    def __init__(self, app: ASGIApp, settings: PageSettings, accounts: Accounts) -> None:
        self._app, self._settings, self._accounts = app, settings, accounts
        self.cookie = cookie_name(settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # no WebSocket is answered
        api = scope["path"].startswith(API)

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                kept = [(name, value) for name, value in message["headers"] if name.lower() != b"server"]
                if all(name != b"cache-control" for name, _ in kept):
                    kept.append((b"cache-control", b"no-store" if api else b"no-cache"))
                message = {**message, "headers": [*kept, *HEADERS]}
            await send(message)

        try:
            self._check(Request(scope))
        except PageError as error:
            await error_response(error)(scope, receive, guarded)
            return
        await self._app(scope, receive, guarded)

    def _check(self, request: Request) -> None:
        """Puts the session, or None, into the request's state.

        Raises:
            PageError: the request is refused.
        """
        settings, headers = self._settings, request.headers
        host = headers.get("host", "")
        if is_loopback(settings.host) and not is_loopback(host_of(host)):
            # A site elsewhere could reach loopback by a DNS name of its own that resolves to it (DNS rebinding).
            raise http_error(403, "only requests to a loopback address are answered", "open http://127.0.0.1")
        request.state.session = None
        # Not `request.url`: older releases of Starlette make it from the header Host.
        if not request.scope["path"].startswith(API):
            return
        if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            raise http_error(403, "the request comes from another site")
        try:
            request.state.session = self._accounts.session_of(request.cookies.get(self.cookie, ""))
        except UserError as error:
            raise of_user_error(error) from error
        if request.method in CHANGES:
            self._check_change(request, host)
        if request.state.session is None and settings.demands_login and request.scope["path"] not in OPEN:
            raise _login()

    def _check_change(self, request: Request, host: str) -> None:
        """Refuses a change whose request does not come from this page.

        Raises:
            PageError: it does not.
        """
        origin = request.headers.get("origin", "").lower()
        # A proxy may serve the page with TLS.
        if not host or origin not in (f"http://{host}".lower(), f"https://{host}".lower()):
            raise http_error(403, "the request comes from another site", "its header Origin must be this page's")
        if request.scope["path"] in OPEN:
            return
        session: Session | None = request.state.session
        given = request.headers.get(CSRF, "")
        if session is None:
            raise http_error(401, "there is no session, or it has ended", "GET /api/me begins one, or log in")
        if not hmac.compare_digest(given.encode(), self._accounts.csrf_of(session).encode()):
            raise http_error(403, "the header {header} is missing or expired", "get it from GET /api/me", header=CSRF)


def cookie_name(settings: PageSettings) -> str:
    """Returns the name of the session's cookie."""
    return f"stoker-session-{settings.port}"


def account_of(request: Request, role: str = "see") -> Account:
    """Returns the user of a request, who must have the rights of a role.

    Raises:
        PageError: the user does not have them, or has to log in first.
    """
    session: Session | None = request.state.session
    account: Account | None = session.account if session is not None else request.app.state.accounts.admitted
    if account is None:
        raise _login()
    if not account.may(role):
        user = account.name
        if role == "admin":
            raise http_error(403, "this requires the role admin (administrator), which {user} does not have", user=user)
        raise http_error(403, "this requires the role run (may run); {user} has the role see (may look)", user=user)
    return account


def _login() -> PageError:
    return http_error(401, "log in first", "POST /api/login with your token")


def error_response(error: PageError) -> JSONResponse:
    """Returns an error as a response."""
    headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
    return JSONResponse(finite(error.as_json()), error.status, headers=headers)
