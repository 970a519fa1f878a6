"""A thousand requests that mean harm or nothing: none reads, writes or runs anything, and none is a traceback."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from browsing import HOST, PATIENCE, Browser, make_run

from stoker.page.app import application

REQUESTS = 1000
SECRET = "4711-secret-of-the-machine"
# Method, path, the keys of its body. Removing a run is left out: it would be done, as it should.
ENDPOINTS = [
    *(("GET", path, ()) for path in ("/api/runs", "/api/schema", "/api/queue", "/api/data", "/api/actions", "/api/me")),
    ("GET", "/api/servers", ()),
    *(("GET", f"/api/servers/{{}}{part}", ()) for part in ("", "/models", "/keys", "/traffic")),
    ("POST", "/api/servers/{}/start", ("port",)),
    ("POST", "/api/servers/{}/stop", ()),
    *(("DELETE", f"/api/servers/{{}}{part}", ()) for part in ("", "/models/x", "/keys/x")),
    ("POST", "/api/servers", ("run", "path", "name", "host", "port")),
    ("POST", "/api/servers/{}/models", ("run", "path", "name")),
    ("POST", "/api/servers/{}/keys", ("name", "role")),
    *(("GET", f"/api/runs/{{}}{part}", ()) for part in ("", "/metrics", "/events", "/log", "/samples", "/files")),
    *(("GET", f"/api/runs/{{}}/{part}", ()) for part in ("stacks", "evaluations", "rollouts", "plan", "rows", "audit")),
    *(("GET", f"/api/{part}/{{}}", ()) for part in ("recipes", "uploads", "actions", "removed")),
    *(("GET", f"{part}/{{}}", ()) for part in ("", "/", "/api", "/static", "/static/..", "/static/vendor", "/api/")),
    ("GET", "/api/data/{}/rows", ()),
    ("DELETE", "/api/queue/{}", ()),
    ("DELETE", "/api/removed-data/{}", ()),
    ("DELETE", "/api/actions/{}", ()),
    ("PATCH", "/api/uploads/{}", ()),
    ("POST", "/api/runs/{}/stop", ()),
    ("POST", "/api/runs/{}/resume", ("changes",)),
    ("POST", "/api/runs/{}/resume-check", ("changes",)),
    ("POST", "/api/runs/{}/fork", ("from", "name", "yaml")),
    ("POST", "/api/removed/{}/restore", ()),
    ("POST", "/api/login", ("token",)),
    ("POST", "/api/jobs", ("yaml", "name")),
    ("POST", "/api/check", ("yaml",)),
    ("POST", "/api/audit", ("yaml",)),
    ("POST", "/api/columns", ("yaml",)),
    ("POST", "/api/rows", ("yaml", "offset", "limit", "packed")),
    ("POST", "/api/runs/{}/token-losses", ("offset", "limit", "packed", "at")),
    ("POST", "/api/plan", ("yaml", "on")),
    ("POST", "/api/edit", ("yaml", "edits")),
    ("POST", "/api/uploads", ("name", "size")),
    ("POST", "/api/data/{}/versions", ("exclude", "edit")),
    ("POST", "/api/actions", ("verb", "run", "options", "yaml", "name")),
    ("POST", "/api/chat", ("run", "adapter", "messages", "temperature", "max_tokens", "system")),
    ("POST", "/api/score", ("run", "rows")),
    ("GET", "/api/runs/{}/log-rows", ()),
    ("POST", "/api/import", ("files", "file", "contents", "format")),
]
METHODS = ["GET", "POST", "PATCH", "DELETE", "PUT", "OPTIONS", "HEAD", "TRACE"]
PARTS = [
    *("..", "../..", "..%2f..%2fsecret", "%2e%2e/%2e%2e/secret", "%2fetc%2fpasswd", "....//secret", "..%5c..%5csecret"),
    *("%00", "%ff%fe", "%0d%0aSet-Cookie:%20x=1", "a" * 5000, "-1", "0", "1e999", "NaN", "null", "true", "secret", "~"),
    *("{{7*7}}", "$(touch ran)", "`touch ran`", ";touch ran;", "|touch ran", "' OR 1=1 --", "<script>", "\u202e", "é"),
    *("file:%2f%2f%2fetc%2fpasswd", "http:%2f%2f127.0.0.1:1", "one", "one-0000000000", "0" * 16, "?", "#", "%"),
]
TEXTS = [
    *(
        "../../secret",
        "/etc/passwd",
        "file:///etc/passwd",
        "~/secret",
        "$(touch ran)",
        "; touch ran",
        "--output=/tmp/x",
    ),
    *(
        "\x00",
        "\ud800",
        "a" * 70_000,
        "{{7*7}}",
        "!!python/object/apply:os.system ['touch ran']",
        "&a [*a]",
        "{",
        "",
        "-",
    ),
    *(
        "task: sft\nmodel: x\ndata: secret.jsonl\n",
        "task: module\nmodule: {model: os.system}\n",
        "task: [",
        "1",
        "null",
    ),
    *(
        "stages: 5",
        "stages: [1]",
        "task: {a: b}\nmodel: [[]]\ndata: {}\n",
        "<<: *x",
        "? {a: b}\n: c",
        "%YAML 9.9\n---\na: b",
    ),
    *("eval", "export", "submit", "train", "rows.jsonl", "x.csv", "user", "deepspeed: ../../secret"),
]
KEYS = [
    *("yaml", "name", "size", "verb", "run", "options", "messages", "adapter", "temperature", "max_tokens", "system"),
    *(
        "files",
        "file",
        "contents",
        "text",
        "token",
        "exclude",
        "edit",
        "edits",
        "from",
        "offset",
        "limit",
        "on",
        "role",
    ),
]
QUERIES = ["keys", "from", "to", "points", "axis", "rank", "offset", "limit", "step", "worst", "task", "last", "on"]


def value(draw: random.Random, depth: int = 0) -> Any:
    """Something that JSON can say."""
    kind = draw.randrange(9 if depth < 3 else 6)
    if kind < 3:
        return draw.choice(TEXTS)
    if kind == 3:
        return draw.choice([0, -1, 1, 2**63, -(2**70), 1e308, 0.5, 10**400])
    if kind == 4:
        return draw.choice([True, False, None])
    if kind == 5:
        return draw.choice(PARTS)
    if kind == 6:
        return [value(draw, depth + 1) for _ in range(draw.randrange(4))]
    return {draw.choice(KEYS): value(draw, depth + 1) for _ in range(draw.randrange(5))}


def request_of(draw: random.Random, known: list[str], csrf: str, cookie: str) -> tuple[str, str, dict[str, str], bytes]:
    """A request: method, address as it is sent, headers, body.

    Args:
        known: ids that there are.
    """
    method, path, keys = draw.choice(ENDPOINTS)
    path = path.replace("{}", draw.choice(known if draw.random() < 0.6 else PARTS))
    if draw.random() < 0.5:
        path += "?" + "&".join(f"{draw.choice(QUERIES)}={draw.choice(PARTS)}" for _ in range(draw.randrange(1, 4)))
    if draw.random() < 0.1:
        method = draw.choice(METHODS)
    headers = {"host": HOST, "origin": f"http://{HOST}", "x-stoker-csrf": csrf, "cookie": cookie}
    headers["content-type"] = draw.choice(["application/json"] * 9 + ["text/plain", "multipart/form-data", "\x7f"])
    if draw.random() < 0.1:
        headers[draw.choice(["range", "last-event-id", "if-none-match", "cookie", "x-forwarded-host"])] = "../" * 50
    if draw.random() < 0.1:
        bodies = [b"{", b"[" * 100_000, b"\xff\xfe", b'{"a": NaN}', b"null", b'"x"', b"\x00" * 100]
        return method, path, headers, draw.choice(bodies)
    body = {key: draw.choice(known) if draw.random() < 0.2 else value(draw) for key in keys if draw.random() < 0.9}
    return method, path, headers, json.dumps(body).encode()


async def sent(app: Any, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, str]:
    """The status and the text of an answer. No client stands between, which would tidy the address up."""
    address, _, query = path.partition("?")
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": unquote(address),
        "raw_path": address.encode("utf-8", "surrogatepass"),
        "query_string": query.encode("utf-8", "surrogatepass"),
        "root_path": "",
        "headers": [(name.encode(), text.encode()) for name, text in headers.items()],
        "client": ("127.0.0.1", 50_000),
        "server": ("127.0.0.1", 7860),
    }
    came = iter([{"type": "http.request", "body": body, "more_body": False}])
    status, parts = 0, []

    async def receive() -> dict[str, Any]:
        for message in came:
            return message
        await asyncio.Event().wait()  # the client stays
        raise AssertionError

    async def send(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)
        parts.append(message.get("body", b""))

    await asyncio.wait_for(app(scope, receive, send), PATIENCE)
    return status, b"".join(parts).decode("utf-8", "replace")


@pytest.mark.parametrize("role", ["admin", "nobody"])
def test_a_thousand_requests_read_write_and_run_nothing(
    make_page: Callable[..., Browser], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    """As the only user of a page, and without a token where one is demanded."""
    for name in ("secret", "secret.jsonl", "state.secret"):
        (tmp_path / name).write_text(SECRET)
    job = make_run(tmp_path / "runs" / "one") / "job.yaml"
    job.write_text("task: sft\nmodel: llama-3m\ndata: secret.jsonl\n")
    page, known = make_page(users=role == "nobody"), ["one"]
    if role == "admin":
        page.begin()
        known = [page.get("/api/runs").json()["runs"][0]["id"]]
        known.append(page.post("/api/uploads", {"name": "rows.jsonl", "size": 5}).json()["id"])
    cookie = "; ".join(f"{name}={text}" for name, text in page.client.cookies.items())
    monkeypatch.chdir(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and "state" not in path.parts}
    statuses: Counter[int] = Counter()

    async def ask_all() -> None:
        app, draw = application(page.page), random.Random(role)
        for number in range(REQUESTS):
            method, path, headers, body = request_of(draw, known, page.csrf, cookie)
            status, text = await sent(app, method, path, headers, body)
            case = (number, method, path[:200], str(body[:300]), status, text[:300])
            statuses[status] += 1
            assert 200 <= status < 500 or status == 507, case
            assert SECRET not in text and "root:" not in text and "Traceback" not in text, case
            if role == "nobody" and unquote(path).startswith("/api/"):
                assert status >= 400, case

    asyncio.run(ask_all())
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and "state" not in path.parts}
    assert after == before
    assert not list(tmp_path.rglob("ran"))
    assert not page.page.queue.entries()
    assert not any(list((tmp_path / "state" / name).iterdir()) for name in ("actions", "servers"))
    if role == "admin":  # many of them were understood
        assert statuses[200] > 100 and statuses[400] > 50 and statuses[404] > 100, statuses
    else:
        assert statuses[401] > 500, statuses
