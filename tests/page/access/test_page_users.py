"""Users that an admin adds, changes and removes through the page; files that come back; logs without secrets."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from browsing import TOKENS, Browser, make_run

from stoker.page.access.mask_secrets import masked_part


def test_a_user_is_added_changed_and_removed(make_page: Callable[..., Browser], tmp_path: Path) -> None:
    page = make_page(users=True).login("boss")
    made = page.post("/api/users", {"name": "new", "role": "see"}).json()
    token = made["token"]
    assert made["command"] == "stoker keys users --add new --role see"
    assert token not in (tmp_path / "users").read_text() + page.page.audit.path.read_text()
    assert page.post("/api/users", {"name": "new", "role": "see"}).status_code == 400
    other = Browser(page.settings)  # another one, on the same files
    other.csrf = other.post("/api/login", {"token": token}).json()["csrf"]
    assert other.get("/api/users").status_code == 403
    assert other.post("/api/users", {"name": "x", "role": "admin"}).status_code == 403
    assert page.send("PATCH", "/api/users/new", {"role": "admin"}).status_code == 200
    assert {"name": "new", "role": "admin"} in other.get("/api/users").json()["users"]
    assert page.send("DELETE", "/api/users/new").status_code == 200
    assert other.get("/api/me").status_code == 401
    actions = [line["action"] for line in page.page.audit.lines()]
    assert actions == ["login", "add user", "login", "change user", "remove user"]


def test_the_last_admin_stays(make_page: Callable[..., Browser], tmp_path: Path) -> None:
    page = make_page(users=True).login("boss")
    assert page.get("/api/me").json()["users"] is True
    assert page.send("DELETE", "/api/users/boss").status_code == 409
    assert page.send("PATCH", "/api/users/boss", {"role": "run"}).status_code == 409
    assert page.send("DELETE", "/api/users/nobody").status_code == 404
    for name, role in (("../x", "see"), ("x", "ask"), ("local", "see"), ("owner", "see")):
        wrong = {"name": name, "role": role}
        assert page.post("/api/users", wrong).status_code == 400
    assert "boss admin" in (tmp_path / "users").read_text() and len(TOKENS) == 3


def test_a_page_without_a_file_of_users_says_so(page: Browser) -> None:
    assert page.get("/api/me").json()["users"] is page.get("/api/users").json()["editable"] is False
    found = page.post("/api/users", {"name": "x", "role": "see"})
    assert found.status_code == 409 and "--users" in found.json()["error"]["hint"]


def test_a_removed_file_comes_back_or_goes_for_good(page: Browser, tmp_path: Path) -> None:
    content = b'{"text": "a"}\n'
    key = page.post("/api/uploads", {"name": "rows.jsonl", "size": len(content)}).json()["id"]
    page.send("PATCH", f"/api/uploads/{key}?offset=0", content=content)
    assert page.send("DELETE", f"/api/data/{key}").json()["command"].startswith(f"mv state/uploads/{key} ")
    assert page.get("/api/data").json()["data"] == []
    assert [each["id"] for each in page.get("/api/removed-data").json()["data"]] == [key]
    for other in ("0" * 16, "..", "*"):
        assert page.post(f"/api/removed-data/{other}/restore").status_code == 404
        assert page.send("DELETE", f"/api/removed-data/{other}").status_code == 404
    restored = page.post(f"/api/removed-data/{key}/restore").json()
    assert restored["done"] and Path(restored["path"]).read_bytes() == content
    assert page.get("/api/removed-data").json()["data"] == []
    assert page.post(f"/api/removed-data/{key}/restore").status_code == 404
    assert page.send("DELETE", f"/api/removed-data/{key}").status_code == 404  # it is not removed any more
    page.send("DELETE", f"/api/data/{key}")
    (row,) = page.get("/api/removed-data").json()["data"]
    assert page.send("DELETE", f"/api/removed-data/{key}").json()["command"] == row["delete"]
    assert not list((tmp_path / "state" / "uploads").iterdir())
    assert page.get("/api/removed-data").json()["data"] == []


def test_the_log_of_a_rank_is_masked(page: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "one")
    (run / "logs").mkdir()
    (run / "logs" / "rank-0.log").write_text("reading s3://me:4711@host/x\nhttps://a/b?token=4711&c=1\nstep 1\n")
    page.page.runs.forget()
    key = page.get("/api/runs").json()["runs"][0]["id"]
    for offset in range(-70, 70):
        found = page.get(f"/api/runs/{key}/log?rank=0&offset={offset}").json()
        assert "4711" not in found["text"] and "711" not in found["text"], offset
    assert "step 1" in page.get(f"/api/runs/{key}/log?rank=0").json()["text"]


@pytest.mark.parametrize("most", [10, 30, 1000])
def test_a_log_is_followed_line_by_line(most: int) -> None:
    lines = [b"step 1\n", b"x: https://me:4711@h/\n", b"bar\r", b"step 2\n", b"key=https://h/?token=47", b"11 \n"]
    log, seen, offset = b"", "", 0
    for line in lines:
        log += line
        for _ in range(8):
            text, offset = masked_part(io.BytesIO(log), offset, most)
            seen += text
    assert "47" not in seen and "step 1\n" in seen and "step 2\n" in seen
    assert offset == len(log)


def test_a_line_that_comes_in_pieces_is_shown_whole_once_it_has_ended() -> None:
    log, seen, offset = b"", "", 0
    for piece in (b"step 1 ", b"done, next", b" one\nstep", b" 2\n"):
        log += piece
        text, offset = masked_part(io.BytesIO(log), offset, 1000)
        seen += text
    assert (seen, offset) == (log.decode(), len(log))
