"""Who is answered: hosts, origins, sessions, roles."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from browsing import HOST, TOKENS, Browser, make_run
from starlette.datastructures import URL
from starlette.requests import Request
from starlette.routing import Route
from starlette.testclient import TestClient

from stoker.errors import UserError
from stoker.page import request_values
from stoker.page.access import accounts
from stoker.page.access.accounts import read_users
from stoker.page.page_error import PageError
from stoker.page.page_settings import SESSION_SECONDS
from stoker.page.request_values import read_object
from stoker.page.routes import run_stream
from stoker.page.run_data.run_index import id_of
from stoker.serve.named_keys import hash_of

COOKIE = "stoker-session-7860"
JOB = {"yaml": "task: sft\nmodel: llama-3m\ndata: chatterbot-corpus\nsteps: 1\n", "name": "mine"}
CHANGES = [
    ("POST", "/api/jobs", "run"),
    ("POST", "/api/check", "run"),
    ("DELETE", "/api/queue/1", "run"),
    ("POST", "/api/runs/x/stop", "run"),
    ("POST", "/api/runs/x/resume", "run"),
    ("POST", "/api/logout", "see"),
]


def test_a_page_of_one_person_needs_no_token_and_has_a_session(page: Browser) -> None:
    me = page.get("/api/me").json()
    assert (me["role"], me["login"], me["csrf"]) == ("admin", False, page.csrf)


def test_answers_have_the_headers_that_protect_the_page(page: Browser) -> None:
    for path in ("/api/me", "/", "/api/none", "/static/none.js"):
        headers = page.get(path).headers
        assert headers["content-security-policy"].startswith("default-src 'self';")
        assert "unsafe" not in headers["content-security-policy"]
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["cache-control"] == ("no-store" if path.startswith("/api/") else "no-cache")
        assert (headers["x-content-type-options"], headers["x-frame-options"]) == ("nosniff", "DENY")
        assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:7860",
        "127.0.0.1.evil.example",
        "",
        "[evil]",
        "10.0.0.1",
        "[::1].evil.example",
        "127.0.0.1:80.evil.example",
    ],
)
def test_a_name_from_elsewhere_that_points_to_loopback_is_refused(page: Browser, host: str) -> None:
    for path in ("/api/me", "/api/runs", "/", "/static/index.js"):
        assert page.get(path, headers={"host": host}).status_code == 403
    assert page.post("/api/check", JOB, headers={"host": host, "origin": f"http://{host}"}).status_code == 403


@pytest.mark.parametrize("host", ["localhost:7860", "127.0.0.1", "[::1]:7860"])
def test_names_of_loopback_are_answered(page: Browser, host: str) -> None:
    assert page.get("/api/me", headers={"host": host}).status_code == 200


def test_another_site_reads_nothing(page: Browser) -> None:
    for site, code in (("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)):
        assert page.get("/api/runs", headers={"sec-fetch-site": site}).status_code == code, site


@pytest.mark.parametrize("scheme", ["http", "https"])  # a proxy may add TLS
def test_a_page_on_another_address_is_reached_by_any_name(make_page: Callable[..., Browser], scheme: str) -> None:
    page = make_page(users=True, host="0.0.0.0")
    headers = {"host": "trainer.lab:7860", "origin": f"{scheme}://trainer.lab:7860"}
    assert page.post("/api/login", {"token": TOKENS["boss"]}, headers=headers).status_code == 200


@pytest.mark.parametrize("secure", [False, True])
def test_the_cookie_is_out_of_reach_of_scripts_and_other_sites(make_page: Callable[..., Browser], secure: bool) -> None:
    page = make_page(users=True, secure=secure)
    cookie = page.post("/api/login", {"token": TOKENS["boss"]}).headers["set-cookie"].lower()
    parts = {part.strip() for part in cookie.split(";")}
    assert {"httponly", "samesite=strict", "path=/", f"max-age={SESSION_SECONDS}"} <= parts
    assert ("secure" in parts) == secure


def test_a_body_is_json_of_a_bounded_size_that_arrives_in_time(page: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_values, "BODY", 100)
    for kind, size, code in (
        ("text/plain", 100, 415),
        ("application/x-www-form-urlencoded", 100, 415),
        ("application/json", 100, 200),
        ("application/json", 101, 413),
    ):
        content = json.dumps({"yaml": "x"}).ljust(size)
        found = page.post("/api/check", content=content, headers={"content-type": kind})
        assert found.status_code == code, (kind, size)
    monkeypatch.setattr(request_values, "BODY_SECONDS", 0.05)

    async def stalled() -> dict[str, Any]:
        await asyncio.sleep(1)
        return {"type": "http.request", "body": b"{}"}

    with pytest.raises(PageError, match=r"within 0\.05 s"):
        asyncio.run(read_object(Request({"type": "http", "method": "POST", "headers": []}, stalled)))


@pytest.mark.parametrize(("method", "path", "role"), CHANGES)
@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": ""},
        {"origin": "http://["},
        {"origin": f"http://{HOST}.evil.example"},
        {"origin": f"https://{HOST}.evil.example"},
        {"x-stoker-csrf": ""},
        {"x-stoker-csrf": "0" * 64},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_changes_that_another_site_asks_for_are_refused(
    page: Browser, method: str, path: str, role: str, headers: dict[str, str]
) -> None:
    found = page.send(method, path, JOB, headers=headers)
    assert found.status_code == 403, found.text
    assert not page.page.queue.entries() and not list(page.page.audit.lines())


def test_a_session_is_not_enough_without_its_own_csrf_value(make_page: Callable[..., Browser]) -> None:
    one, other = make_page().begin(), make_page().begin()
    assert one.csrf != other.csrf
    other.csrf = one.csrf
    assert other.post("/api/check", JOB).status_code == 403


@pytest.mark.parametrize(
    "path", ["/api/me", "/api/runs", "/api/schema", "/api/queue", "/api/recipes", "/api/none", "/api/script"]
)
def test_without_a_token_nothing_is_told_where_one_is_demanded(make_page: Callable[..., Browser], path: str) -> None:
    page = make_page(users=True, host="0.0.0.0")
    found = page.get(f"/api/{path}")
    assert found.status_code == 401
    assert set(found.json()["error"]) == {"message", "hint", "file", "line", "column", "key", "repeats"}


@pytest.mark.parametrize("path", ["/api/users", "/api/audit-log", "/api/me", "/api/runs"])
def test_the_guard_goes_by_the_path_that_is_routed(
    make_page: Callable[..., Browser], monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Starlette before 1.0.1 makes `request.url` from the header Host, such as ``h:1/x``."""
    page = make_page(users=True, host="0.0.0.0")
    monkeypatch.setattr(Request, "url", property(lambda request: URL(f"http://h:1/x{request.scope['path']}")))
    assert page.get(path).status_code == 401
    assert page.post("/api/check", JOB).status_code in (401, 403)
    assert page.post("/api/login", {"token": TOKENS["boss"]}, headers={"origin": "http://evil"}).status_code == 403
    assert page.post("/api/login", {"token": TOKENS["boss"]}).status_code == 200


def test_no_session_is_no_account_where_a_login_is_demanded(make_page: Callable[..., Browser]) -> None:
    assert make_page(users=True).page.accounts.admitted is None
    assert make_page(token="a token of one person").page.accounts.admitted is None
    assert make_page().page.accounts.admitted == accounts.Account("local", "admin", "")


def test_wrong_tokens_are_refused_and_soon_no_longer_read(make_page: Callable[..., Browser]) -> None:
    page = make_page(users=True)
    codes = [page.post("/api/login", {"token": f"guess-{n}"}).status_code for n in range(12)]
    assert codes == [401] * 10 + [429] * 2
    assert page.post("/api/login", {"token": TOKENS["boss"]}).status_code == 429
    assert [line["action"] for line in page.page.audit.lines()] == ["login refused"] * 10


def test_wrong_tokens_that_are_sent_together_are_counted_one_by_one(make_page: Callable[..., Browser]) -> None:
    page = make_page(users=True)
    headers = {"origin": f"http://{HOST}", "content-type": "application/json"}

    async def body() -> AsyncIterator[bytes]:
        await asyncio.sleep(0.5)  # until all requests have begun
        yield b'{"token": "x"}'

    async def codes() -> list[int]:
        transport = httpx2.ASGITransport(app=page.client.app)
        async with httpx2.AsyncClient(transport=transport, base_url=f"http://{HOST}", timeout=60) as client:
            sent = (client.post("/api/login", content=body(), headers=headers) for _ in range(14))
            return sorted(answer.status_code for answer in await asyncio.gather(*sent))

    assert asyncio.run(codes()) == [401] * 10 + [429] * 4


def test_wrong_tokens_lock_out_their_own_address_alone(make_page: Callable[..., Browser]) -> None:
    page = make_page(users=True)
    other = TestClient(page.client.app, base_url=f"http://{HOST}", client=("10.0.0.9", 1))
    codes = [other.post("/api/login", json={"token": "x"}, headers={"origin": f"http://{HOST}"}) for _ in range(11)]
    assert [code.status_code for code in codes] == [401] * 10 + [429]
    assert page.post("/api/login", {"token": TOKENS["boss"]}).status_code == 200


def test_a_stream_ends_with_its_session(make_page: Callable[..., Browser], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_stream, "SESSION_EVERY", 0.0)
    page = make_page(users=True).login("viewer")
    held = page.page.accounts
    session = held.session_of(page.client.cookies[COOKIE])
    assert session is not None
    held.end(session)
    request = Request({"type": "http", "headers": [(b"cookie", f"{COOKIE}={page.client.cookies[COOKIE]}".encode())]})

    async def parts() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b"part"

    async def kept() -> list[bytes]:
        return [part async for part in run_stream.RunStream(page.page).while_admitted(request, parts())]

    assert asyncio.run(kept()) == []
    page.login("viewer")
    cookie = f"{COOKIE}={page.client.cookies[COOKIE]}"
    request = Request({"type": "http", "headers": [(b"cookie", cookie.encode())]})
    assert asyncio.run(kept()) == [b"part"] * 3


def test_a_session_ends_with_logging_out_and_a_stolen_cookie_with_it(make_page: Callable[..., Browser]) -> None:
    page = make_page(users=True).login("boss")
    stolen = page.client.cookies[COOKIE]
    assert page.get("/api/runs").status_code == 200
    assert page.post("/api/logout").status_code == 200
    page.login("viewer").post("/api/logout")  # which forgets no session that was ended before
    assert page.page.accounts.session_of(stolen) is None
    thief = make_page(users=True)  # a page that was started again, too
    thief.client.cookies.set(COOKIE, stolen)
    assert thief.get("/api/runs").status_code == 401


def test_a_session_outlives_the_page_and_ends_in_time(
    make_page: Callable[..., Browser], monkeypatch: pytest.MonkeyPatch
) -> None:
    cookie = make_page(users=True).login("viewer").client.cookies[COOKIE]
    again = make_page(users=True)
    again.client.cookies.set(COOKIE, cookie)
    assert again.get("/api/me").json()["name"] == "viewer"
    now = time.time()
    monkeypatch.setattr(accounts.time, "time", lambda: now + 12 * 3600 + 1)
    assert again.get("/api/me").status_code == 401


@pytest.mark.parametrize("change", ["boss|", "later", "unsigned", "garbage", "long"])
def test_a_cookie_that_was_changed_is_none(make_page: Callable[..., Browser], change: str) -> None:
    page = make_page(users=True).login("viewer")
    text = base64.urlsafe_b64decode(page.client.cookies[COOKIE] + "==").decode()
    name, number, until, signature = text.split("|")
    forged = {
        "boss|": f"boss|{number}|{until}|{signature}",
        "later": f"{name}|{number}|{int(until) + 9999}|{signature}",
        "unsigned": f"{name}|{number}|{until}|",
        "garbage": "\x00\xff||||",
        "long": "a" * 5000,
    }[change]
    page.client.cookies.clear()
    assert page.get("/api/me").status_code == 401
    page.client.cookies.set(COOKIE, base64.urlsafe_b64encode(forged.encode()).decode().rstrip("="))
    assert page.get("/api/me").status_code == 401


def test_the_key_of_sessions_is_its_owners_and_a_damaged_one_is_replaced(
    make_page: Callable[..., Browser], tmp_path: Path
) -> None:
    key = tmp_path / "state" / "session.key"
    for damaged in (None, b"", b"short", bytes(33)):
        if damaged is not None:
            key.write_bytes(damaged)
        make_page()
        assert len(key.read_bytes()) == accounts.KEY_BYTES and key.stat().st_mode & 0o777 == 0o600
    kept = key.read_bytes()
    make_page()
    assert key.read_bytes() == kept


def test_a_new_token_ends_the_sessions_of_the_old_one(make_page: Callable[..., Browser], tmp_path: Path) -> None:
    page = make_page(users=True).login("viewer")
    lines = (tmp_path / "users").read_text().replace(hash_of(TOKENS["viewer"]), hash_of("another token of a viewer"))
    (tmp_path / "users").write_text(lines + "# changed\n")
    assert page.get("/api/me").status_code == 401
    page.login("boss")
    (tmp_path / "users").unlink()  # nobody is a user any more
    assert page.get("/api/runs").status_code == 400 and "cannot be read" in page.get("/api/runs").text


@pytest.mark.parametrize(("method", "path", "role"), [each for each in CHANGES if each[2] != "see"])
def test_who_may_see_may_not_change(make_page: Callable[..., Browser], method: str, path: str, role: str) -> None:
    page = make_page(users=True).login("viewer")
    found = page.send(method, path, JOB)
    assert (found.status_code, f"requires the role {role} (" in found.text) == (403, True)
    assert not page.page.queue.entries()


@pytest.mark.parametrize(("name", "below"), [("viewer", "/api/"), ("runner", "/api/users")])
def test_every_change_needs_its_role_before_anything_is_done(
    make_page: Callable[..., Browser], name: str, below: str
) -> None:
    page = make_page(users=True).login(name)
    guard: Any = page.client.app
    changes = [
        (method, re.sub(r"\{\w+\}", "0" * 16, route.path))
        for route in guard._app.routes
        if isinstance(route, Route) and route.path.startswith(below) and ":path" not in route.path
        for method in (route.methods or set()) - {"GET", "HEAD"}
    ]
    changes = [each for each in changes if each[1] not in ("/api/login", "/api/logout")]
    assert len(changes) == 3 if name == "runner" else len(changes) > 30
    for method, path in changes:
        found = page.send(method, path, {})
        assert (found.status_code, "requires the role" in found.text) == (403, True), (method, path, found.text)


def test_a_script_has_the_actions_of_its_user_and_an_admins_those_of_all(make_page: Callable[..., Browser]) -> None:
    page = make_page(users=True)
    for name in TOKENS:
        page.page.audit.write(name, "train", command=f"stoker train {name}.yaml")
    for name in TOKENS:
        text = page.login(name).get("/api/script").text
        seen = {other for other in TOKENS if f"stoker train {other}.yaml" in text}
        assert seen == (set(TOKENS) if name == "boss" else {name})


def test_the_log_is_its_owners_and_not_written_through_a_link(page: Browser, tmp_path: Path) -> None:
    page.page.audit.write("me", "train")
    log = tmp_path / "state" / "audit.jsonl"
    assert log.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
    log.unlink()
    log.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        page.page.audit.write("me", "train")
    assert not (tmp_path / "elsewhere").exists()


def test_users_and_the_log_are_for_an_admin(make_page: Callable[..., Browser]) -> None:
    for name, code in (("viewer", 403), ("runner", 403), ("boss", 200)):
        page = make_page(users=True).login(name)
        assert [page.get(path).status_code for path in ("/api/users", "/api/audit-log")] == [code, code]
    assert {line["user"] for line in page.get("/api/audit-log").json()["lines"]} == {"viewer", "runner", "boss"}
    assert TOKENS["boss"] not in page.get("/api/audit-log").text + page.get("/api/users").text


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("me admin", "2 words"),
        ("me king " + "0" * 64, "is not a role"),
        ("me see 0000", "not a SHA-256"),
        ("local see " + "0" * 64, "cannot be a name"),
        ("", "contains no users"),
    ],
)
def test_a_wrong_file_of_users_is_refused_with_its_line(tmp_path: Path, line: str, what: str) -> None:
    file = tmp_path / "users"
    file.write_text(f"# name role hash\n{line}\n")
    with pytest.raises(UserError, match=what) as found:
        read_users(file)
    assert found.value.problems[0].line == (2 if line else 0)


def test_a_name_that_no_file_can_have_is_refused(page: Browser, tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "one")
    page.page.runs.forget()
    long = "x" * 300
    for path, body in (
        ("/api/jobs", {"yaml": f"task: sft\nmodel: llama-3m\ndata: chatterbot-corpus\noutput: runs/{long}\n"}),
        ("/api/servers", {"path": f"runs/{long}"}),
        ("/api/actions", {"verb": "eval", "run": id_of(tmp_path / "runs" / "one"), "options": {"data": long}}),
    ):
        found = page.post(path, body)
        assert (found.status_code, found.json()["error"]["hint"]) == (400, "write a shorter one"), path


def test_the_page_says_nothing_of_its_bugs(
    make_page: Callable[..., Browser], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path / "runs" / "one")
    page = make_page()

    def fail(*_: object) -> None:
        raise RuntimeError("secret of the code")

    monkeypatch.setattr(page.page.views, "summary", fail)
    found = page.get("/api/runs")
    assert found.status_code == 500 and "secret" not in found.text
    assert json.loads(found.text)["error"]["message"].startswith("the page failed")
