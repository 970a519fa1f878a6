"""Uploads in parts, versions of files, and names that would lead elsewhere."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from browsing import Browser, eventually, make_run
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from stoker.data.files.byte_streams import MAGIC
from stoker.data.files.readers import SUFFIXES
from stoker.page import routing
from stoker.page.access.accounts import Account
from stoker.page.access.job_paths import document_of, new_job_problems, path_problems
from stoker.page.app import STATIC
from stoker.page.data_files import uploads
from stoker.page.data_files.file_reads import AT_ONCE, FileReads
from stoker.page.data_files.uploads import clean_name
from stoker.page.page_error import PageError
from stoker.page.processes.job_queue import JobQueue
from stoker.page.routes import data_routes
from stoker.page.run_data.run_index import id_of
from stoker.serve.guard import ClientLeft

pytestmark = pytest.mark.usefixtures("warm_processes")

ROWS = [{"prompt": f"What is {n}?", "completion": f"It is {n}."} for n in range(1, 8)]
CONTENT = "".join(json.dumps(row) + "\n" for row in ROWS).encode()

ADMIN = Account("boss", "admin", "")


def upload(page: Browser, content: bytes = CONTENT, name: str = "rows.jsonl") -> str:
    """The id of a whole upload."""
    key = page.post("/api/uploads", {"name": name, "size": len(content)}).json()["id"]
    found = page.send("PATCH", f"/api/uploads/{key}?offset=0", content=content)
    assert found.json()["done"], found.text
    return str(key)


def test_the_page_offers_the_kinds_of_files_that_are_read() -> None:
    listed = re.search(r'DATA_FILES = "(.*)"', (STATIC / "upload.js").read_text())
    assert listed and listed[1].split(",") == [*SUFFIXES, *MAGIC]
    users = [path.name for path in STATIC.glob("*.js") if "accept=${DATA_FILES}" in path.read_text()]
    assert sorted(users) == ["data.js", "start.js"]


@pytest.mark.parametrize(
    ("name", "content", "columns", "format", "unreadable", "problem"),
    [
        ("a.jsonl", CONTENT, ["prompt", "completion"], "prompt", 0, ""),
        ("b.csv", b"Frage;Antwort\nWer?;Ich.\n", ["Frage", "Antwort"], "", 0, ""),
        ("c.jsonl", CONTENT + b"oops\n", ["prompt", "completion"], "prompt", 1, ""),
        ("d.jsonl", b"oops\n", [], "", 1, "no row can be read: not valid JSON"),
        ("e.jsonl", b"\n", [], "", 0, "the file is empty"),
        ("f.svm", b"1 1:2\n", [], "svm", 0, ""),
    ],
)
def test_the_first_rows_show_columns_and_format(
    page: Browser, name: str, content: bytes, columns: list[str], format: str, unreadable: int, problem: str
) -> None:
    found = page.get(f"/api/data/{upload(page, content, name)}/format").json()
    assert (found["columns"], found["format"], found["unreadable"]) == (columns, format, unreadable)
    assert (found["problem"] or {"message": ""})["message"].startswith(problem) and bool(found["problem"]) == bool(
        problem
    )


CLICKS = "user,seen,click\n" + "".join(f"{n % 7},{1700000000 + 60 * n},{n % 2}\n" for n in range(50))
PAIRS = json.dumps({"query": "SELECT 1", "asked": "One?", "chosen": "1", "rejected": "2", "id": 7}).encode() + b"\n"


def test_the_first_rows_show_what_the_columns_are_taken_as(page: Browser) -> None:
    found = page.get(f"/api/data/{upload(page, PAIRS)}/format").json()
    assert found["taken"] == {"chosen": "chosen", "rejected": "rejected", "prompt": "query"}
    found = page.get(f"/api/data/{upload(page, CLICKS.encode(), 'a.csv')}/format").json()
    assert (found["taken"], found["likely_time"]) == ({}, "seen")
    named = upload(page, CLICKS.replace("user,seen", "seen,time").encode(), "b.csv")
    assert page.get(f"/api/data/{named}/format").json()["likely_time"] == ""  # it needs no proposal


def test_a_job_says_what_the_columns_of_its_data_are_taken_as(page: Browser) -> None:
    def sources(job: str) -> list[dict[str, Any]]:
        answer = page.post("/api/columns", {"yaml": job})
        assert answer.status_code == 200, answer.text
        found: list[dict[str, Any]] = answer.json()["sources"]
        return found

    pairs, clicks = (
        page.get(f"/api/uploads/{key}").json()["path"]
        for key in (upload(page, PAIRS), upload(page, CLICKS.encode(), "a.csv"))
    )
    (one,) = sources(f"task: dpo\nmodel: llama-3m\ndata: {pairs}\nsteps: 1\n")
    assert (one["key"], one["format"], one["path"]) == ("data[0].columns", "preference", pairs)
    assert one["roles"] == {"chosen": "chosen", "rejected": "rejected", "prompt": "query"}
    both = f"data:\n- {clicks}\n- {{path: {pairs}, columns: {{prompt: asked}}}}\n"
    (one,) = sources(f"task: dpo\nmodel: llama-3m\n{both}steps: 1\n")  # clicks fit no format: the audit says so
    assert (one["key"], one["roles"]["prompt"]) == ("data[1].columns", "asked")
    log = f"task: ranking\ndata: {clicks}\nsteps: 1\nranking: {{label: %s}}\n"
    (one,) = sources(log % "rating")
    assert one["roles"] == {"label": "", "time": "", "group": "user", "weight": ""}
    assert (one["key"], one["proposed"], one["ignore"]) == ("ranking", {"time": "seen"}, [])
    (one,) = sources(log % "click, time: seen, ignore: [user]")
    assert (one["roles"]["label"], one["roles"]["time"], one["proposed"]) == ("click", "seen", {})
    assert one["ignore"] == ["user"]
    assert sources("task: sft\nmodel: llama-3m\ndata: none.jsonl\nsteps: 1\n") == []
    outside = page.post("/api/columns", {"yaml": "task: sft\nmodel: llama-3m\ndata: /etc/passwd\nsteps: 1\n"})
    assert outside.status_code == 403


def test_the_error_for_a_spreadsheet_says_how_to_save_it(page: Browser) -> None:
    own = page.post("/api/uploads", {"name": "upload.json", "size": 9}).json()["error"]
    assert own["message"] == "`upload.json` is a name of the page's own files"
    refused = page.post("/api/uploads", {"name": "Tabelle.XLSX", "size": 9}).json()["error"]
    assert "CSV UTF-8" in refused["hint"]


def test_an_upload_goes_on_where_it_was_cut(page: Browser) -> None:
    key = page.post("/api/uploads", {"name": "rows.jsonl", "size": len(CONTENT)}).json()["id"]
    assert page.send("PATCH", f"/api/uploads/{key}?offset=0", content=CONTENT[:100]).json()["offset"] == 100
    for offset in (0, 99, 101):
        refused = page.send("PATCH", f"/api/uploads/{key}?offset={offset}", content=CONTENT[100:])
        assert (refused.status_code, refused.json()["error"]["hint"]) == (409, "continue at byte 100")
    assert page.post(f"/api/data/{key}/versions", {"exclude": [1]}).status_code == 409
    again = page.get(f"/api/uploads/{key}").json()
    assert (again["offset"], again["done"]) == (100, False)
    whole = page.send("PATCH", f"/api/uploads/{key}?offset=100", content=CONTENT[100:]).json()
    assert whole["done"] and Path(whole["path"]).read_bytes() == CONTENT


def test_an_upload_goes_on_behind_a_part_that_stops_arriving(page: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "SILENCE", 0.2)
    key = page.post("/api/uploads", {"name": "rows.jsonl", "size": len(CONTENT)}).json()["id"]
    folder = uploads.Uploads(page.settings.uploads)

    async def stalled() -> AsyncIterator[bytes]:
        yield CONTENT[:100]
        await asyncio.sleep(60)

    with pytest.raises(PageError, match=r"no byte was received within 0\.2 s"):
        asyncio.run(folder.append(folder.find(key), 0, stalled()))
    assert asyncio.run(folder.append(folder.find(key), 100, _all_of(CONTENT[100:]))) == len(CONTENT)


async def _all_of(content: bytes) -> AsyncIterator[bytes]:
    yield content


def test_a_client_that_leaves_is_no_failure_of_the_page(page: Browser, caplog: pytest.LogCaptureFixture) -> None:
    async def answer(_: Request) -> None:
        raise ClientDisconnect

    async def ask() -> Response:
        return await routing.route("/", answer, role="").endpoint(Request({"type": "http", "method": "GET"}))

    assert asyncio.run(ask()).status_code == 499 and not caplog.records


def test_an_incomplete_file_is_not_trained_on(page: Browser, tmp_path: Path) -> None:
    key = page.post("/api/uploads", {"name": "rows.jsonl", "size": len(CONTENT)}).json()["id"]
    page.send("PATCH", f"/api/uploads/{key}?offset=0", content=CONTENT[:100])
    make_run(tmp_path / "runs" / "one")
    page.page.runs.forget()
    path = page.get(f"/api/uploads/{key}").json()["path"]
    for place in (Path(path).parent, Path(path).parent / "*.jsonl", path):
        job = f"task: sft\nmodel: llama-3m\ndata: {place}\nsteps: 1\n"
        (problem,) = page.post("/api/check", {"yaml": job}).json()["problems"]
        assert (problem["message"], problem["line"]) == ("the upload of `rows.jsonl` is incomplete", 3)
    assert page.post("/api/jobs", {"yaml": job}).status_code == 403
    evaluation = {"verb": "eval", "run": id_of(tmp_path / "runs" / "one"), "options": {"answers": path}}
    refused = page.post("/api/actions", evaluation)
    assert (refused.status_code, refused.json()["error"]["message"]) == (403, problem["message"])
    page.send("PATCH", f"/api/uploads/{key}?offset=100", content=CONTENT[100:])
    assert page.post("/api/check", {"yaml": job}).json()["problems"] == []


@pytest.mark.parametrize("end", ["incomplete", "appended", "masked"])
def test_a_run_on_an_odd_upload_is_still_used(
    page: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    key = page.post("/api/uploads", {"name": "rows.jsonl", "size": len(CONTENT)}).json()["id"]
    page.send("PATCH", f"/api/uploads/{key}?offset=0", content=CONTENT[: 100 if end == "incomplete" else None])
    path = page.get(f"/api/uploads/{key}").json()["path"]
    if end == "appended":
        with Path(path).open("ab") as file:
            file.write(CONTENT)
    data = "https://***@host/rows.jsonl" if end == "masked" else path
    job = f"task: sft\nmodel: llama-3m\ndata: {data}\nsteps: 1\n"
    run = make_run(tmp_path / "runs" / "one")
    (run / "job.yaml").write_text(job)
    page.page.runs.forget()
    document = document_of(job)
    assert path_problems(document, page.settings, ADMIN) == []
    assert bool(new_job_problems(document, page.settings, ADMIN)) == (end != "appended")
    assert page.post("/api/check", {"yaml": job}).json()["problems"] == [] or end != "appended"
    monkeypatch.setattr(JobQueue, "start_starter", lambda _: None)
    assert page.post(f"/api/runs/{id_of(run)}/resume").status_code == 200
    assert page.get(f"/api/uploads/{key}").json()["done"] is (end != "incomplete")


def test_parts_of_a_file_come_one_at_a_time(page: Browser) -> None:
    key = page.post("/api/uploads", {"name": "rows.jsonl", "size": len(CONTENT)}).json()["id"]
    folder = uploads.Uploads(page.settings.uploads)

    async def both() -> None:
        go = asyncio.Event()

        async def held() -> AsyncIterator[bytes]:
            await go.wait()
            yield CONTENT[:100]

        first = asyncio.create_task(folder.append(folder.find(key), 0, held()))
        await asyncio.sleep(0)
        with pytest.raises(PageError, match="another part of this file is being written"):
            await folder.append(folder.find(key), 0, _all_of(CONTENT))
        go.set()
        assert await first == 100

    asyncio.run(both())


def test_a_part_and_the_disk_have_bounds(page: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    free = SimpleNamespace(free=uploads.SPARE + len(CONTENT))
    monkeypatch.setattr(uploads.shutil, "disk_usage", lambda _: free)
    monkeypatch.setattr(uploads, "CHUNK", 100)
    asked = {"name": "rows.jsonl", "size": len(CONTENT)}
    assert page.post("/api/uploads", {**asked, "size": len(CONTENT) + 1}).status_code == 507
    key = page.post("/api/uploads", asked).json()["id"]
    assert page.send("PATCH", f"/api/uploads/{key}?offset=0", content=CONTENT[:101]).status_code == 413
    offset = page.get(f"/api/uploads/{key}").json()["offset"]
    assert page.send("PATCH", f"/api/uploads/{key}?offset={offset}", content=CONTENT[:100]).status_code == 200


def test_no_more_comes_than_was_announced(page: Browser) -> None:
    key = page.post("/api/uploads", {"name": "rows.jsonl", "size": 10}).json()["id"]
    assert page.send("PATCH", f"/api/uploads/{key}?offset=0", content=CONTENT[:6]).status_code == 200
    assert page.send("PATCH", f"/api/uploads/{key}?offset=6", content=CONTENT[6:12]).status_code == 413
    key = page.post("/api/uploads", {"name": "rows.jsonl", "size": 10}).json()["id"]
    assert page.send("PATCH", f"/api/uploads/{key}?offset=0", content=CONTENT).status_code == 413
    assert page.get(f"/api/uploads/{key}").json()["offset"] <= 10
    assert page.post("/api/uploads", {"name": "rows.jsonl", "size": 1 << 39}).status_code == 507


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("../../etc/cron.d/x.jsonl", "x.jsonl"),
        ("..\\..\\x.csv", "x.csv"),
        ("/etc/x.txt", "x.txt"),
        (".hidden.jsonl", "hidden.jsonl"),
        ("a b$c\x1b.jsonl", "a b$c_.jsonl"),
        ("-rf.jsonl", "rf.jsonl"),
        ("a\u202ejsonl.csv", "a_jsonl.csv"),
    ],
)
def test_a_name_keeps_nothing_that_leads_elsewhere(page: Browser, tmp_path: Path, name: str, kept: str) -> None:
    key = page.post("/api/uploads", {"name": name, "size": 1}).json()["id"]
    path = Path(page.get(f"/api/uploads/{key}").json()["path"])
    assert path == (tmp_path / "state" / "uploads" / key / kept).resolve()


@pytest.mark.parametrize("name", ["", "..", "x", "x.exe", "x.py", "upload.json/", "\x00.jsonl", "x.yaml", "x.pkl"])
def test_other_kinds_of_files_are_refused(page: Browser, tmp_path: Path, name: str) -> None:
    assert page.post("/api/uploads", {"name": name, "size": 1}).status_code == 400
    assert not list((tmp_path / "state" / "uploads").iterdir())


@pytest.mark.parametrize("key", ["..", "%2e%2e", "..%2f..%2fsession.key", "0" * 16, "x" * 16, "0" * 15, "a" * 400])
def test_an_id_is_no_path(page: Browser, key: str) -> None:
    for method, path in (("GET", f"/api/uploads/{key}"), ("PATCH", f"/api/uploads/{key}?offset=0")):
        assert page.send(method, path).status_code in (404, 405), (method, path)
    assert page.get(f"/api/data/{key}/rows").status_code == 404


def test_a_version_leaves_rows_out_and_changes_others_and_says_so(page: Browser) -> None:
    key = upload(page)
    rows = page.get(f"/api/data/{key}/rows?offset=1&limit=2").json()["rows"]
    assert [row["value"] for row in rows] == ROWS[1:3]
    numbers = [row["row"] for row in rows]
    edited = {"prompt": "What is three?", "completion": "3."}
    made = page.post(f"/api/data/{key}/versions", {"exclude": numbers[:1], "edit": {str(numbers[1]): edited}}).json()
    assert (made["parent"], made["changes"], made["name"]) == (
        key,
        {"excluded": 1, "edited": 1, "unreadable": 0},
        "rows-v2.jsonl",
    )
    lines = [json.loads(line) for line in Path(made["path"]).read_text().splitlines()]
    assert lines == [ROWS[0], edited, *ROWS[3:]]
    assert Path(page.get(f"/api/uploads/{key}").json()["path"]).read_bytes() == CONTENT
    again = page.post(f"/api/data/{made['id']}/versions", {"exclude": [1]}).json()
    assert (again["parent"], again["name"]) == (made["id"], "rows-v3.jsonl")
    assert [each["id"] for each in page.get("/api/data").json()["data"]] == [again["id"], made["id"], key]
    for gone in (made, again):  # a removed version may come back
        page.send("DELETE", f"/api/data/{gone['id']}")
        assert page.post(f"/api/data/{key}/versions", {"exclude": [1]}).json()["name"] != again["name"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.csv", b'prompt,completion\n"a\nb",c\n\nd,e\nf,g\n'),
        ("rows.jsonl", b'\n{"prompt": "a"}\n\n\n{"prompt": "d"}\n{"prompt": "f"}\n'),
    ],
)
def test_a_row_is_found_by_the_number_that_messages_give_it(page: Browser, name: str, content: bytes) -> None:
    key = upload(page, content, name)
    rows = page.get(f"/api/data/{key}/rows").json()["rows"]
    assert [row["row"] for row in rows] != [1, 2, 3]
    for row in rows:
        assert page.get(f"/api/data/{key}/rows?row={row['row']}&limit=1").json()["rows"] == [row]
    assert page.get(f"/api/data/{key}/rows?row={rows[0]['row']}").json()["rows"] == rows
    assert page.get(f"/api/data/{key}/rows?row=99").status_code == 404
    edited = {"prompt": "changed", "completion": ""}
    made = page.post(f"/api/data/{key}/versions", {"edit": {str(rows[1]["row"]): edited}}).json()
    lines = [json.loads(line) for line in Path(made["path"]).read_text().splitlines()]
    assert lines == [rows[0]["value"], edited, rows[2]["value"]]


def test_large_integers_are_kept_in_edited_rows(page: Browser) -> None:
    key = upload(page, b'{"id": 9007199254740993, "text": "a"}\n')
    (row,) = page.get(f"/api/data/{key}/rows").json()["rows"]
    assert row["text"] == '{\n "id": 9007199254740993,\n "text": "a"\n}'
    made = page.post(f"/api/data/{key}/versions", {"edit": {"1": row["text"].replace('"a"', '"b"')}}).json()
    assert Path(made["path"]).read_text() == '{"id": 9007199254740993, "text": "b"}\n'


def test_a_version_says_which_rows_cannot_be_read(page: Browser) -> None:
    key = upload(page, b'{"text": "a"}\n{broken\n5\n{"text": "d"}\n{also broken\n')
    made = page.post(f"/api/data/{key}/versions", {"exclude": [5], "edit": {"1": {"text": "b"}}}).json()
    assert made["changes"] == {"excluded": 1, "edited": 1, "unreadable": 2}
    assert [place["row"] for place in made["unreadable"]] == [2, 3]
    assert made["unreadable"][1]["reason"].startswith("not an object")
    assert page.get("/api/data").json()["data"][0] == made


@pytest.mark.parametrize("name", ["my data 客服 (v1).jsonl", "Fragen & Antworten.csv", "a[1]*{b}? <b>$HOME.jsonl"])
def test_a_name_keeps_its_spaces_and_letters(page: Browser, name: str) -> None:
    key = page.post("/api/uploads", {"name": f"C:\\\n{name}", "size": len(CONTENT)}).json()["id"]
    found = page.send("PATCH", f"/api/uploads/{key}?offset=0", content=CONTENT).json()
    assert found["name"] == name
    job, edits = "task: sft\nmodel: llama-3m\ndata: x\nsteps: 1\n", [{"key": "data", "value": found["path"]}]
    edited = page.post("/api/edit", {"yaml": job, "edits": edits}).json()["yaml"]
    assert page.post("/api/check", {"yaml": edited}).json()["problems"] == []


@pytest.mark.parametrize(
    ("stem", "ending"),
    [
        ("x" * 114, ".jsonl"),
        ("_" + "x" * 200, ".jsonl"),
        ("行" * 90, ".jsonl"),
        ("x" * 300, ".jsonl.gz"),
        ("..-x" * 90, ".csv"),
    ],
)
def test_long_names_are_cut_before_their_suffix(page: Browser, stem: str, ending: str) -> None:
    key = page.post("/api/uploads", {"name": stem + ending, "size": len(CONTENT)}).json()["id"]
    whole = page.send("PATCH", f"/api/uploads/{key}?offset=0", content=CONTENT).json()
    assert whole["done"] and Path(whole["path"]).read_bytes() == CONTENT
    kept = whole["name"]
    assert len(kept.encode()) <= 200 and kept.endswith(ending)
    assert kept[:50] in stem
    assert clean_name(kept) == kept
    if ending == ".jsonl":
        made = page.post(f"/api/data/{key}/versions", {"exclude": [1]}).json()
        assert made["name"].endswith("-v2.jsonl") and len(made["name"].encode()) <= 200
        again = page.post(f"/api/data/{made['id']}/versions", {"exclude": [1]}).json()
        assert again["name"] == made["name"].replace("-v2", "-v3")


@pytest.mark.parametrize(
    "record", ["{}", "5", '{"name": "../../session.key"}', '{"name": 5}', '{"name": "gone.jsonl"}']
)
def test_a_broken_upload_hides_no_other(page: Browser, tmp_path: Path, record: str) -> None:
    kept, broken = upload(page), upload(page)
    path = tmp_path / "state" / "uploads" / broken / "upload.json"
    values = json.loads(record)
    path.write_text(
        json.dumps(json.loads(path.read_text()) | values) if isinstance(values, dict) and values else record
    )
    assert [each["id"] for each in page.get("/api/data").json()["data"]] == [kept]
    assert page.get(f"/api/uploads/{broken}").status_code == 404


@pytest.mark.parametrize("record", ["{}", "5", '{"id": "0123456789abcdef"}', '{"id": 5}'])
def test_a_broken_removed_upload_hides_no_other(page: Browser, tmp_path: Path, record: str) -> None:
    kept, broken = upload(page), upload(page)
    for key in (kept, broken):
        page.send("DELETE", f"/api/data/{key}")
    (path,) = (tmp_path / "state" / "uploads").glob(f"removed-{broken}-*/upload.json")
    values = json.loads(record)
    path.write_text(json.dumps(json.loads(path.read_text()) | values) if values and values != 5 else record)
    assert [each["id"] for each in page.get("/api/removed-data").json()["data"]] == [kept]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"exclude": [99]},
        {"edit": {"99": {"text": "a"}}},
        {"exclude": "1"},
        {"exclude": [True]},
        {"edit": {"x": {}}},
        {"edit": {"1": 5}},
        {"edit": {"1": "{"}},
        {"edit": {"1": '{"a": "\\ud83d"}'}},
    ],
)
def test_changes_that_mean_nothing_make_no_version(page: Browser, changes: dict[str, object]) -> None:
    key = upload(page)
    assert page.post(f"/api/data/{key}/versions", changes).status_code == 400
    assert [path.name for path in page.settings.uploads.iterdir()] == [key]


def test_a_table_becomes_lines_of_json_in_its_version(page: Browser) -> None:
    key = upload(page, b"prompt,completion\na,b\nc,d\n", "rows.csv")
    rows = page.get(f"/api/data/{key}/rows").json()["rows"]
    made = page.post(f"/api/data/{key}/versions", {"exclude": [rows[0]["row"]]}).json()
    assert Path(made["path"]).read_text() == '{"prompt": "c", "completion": "d"}\n'


def test_a_small_archive_of_a_large_array_fills_no_memory(page: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "WHOLE", 1 << 20)
    key = upload(page, gzip.compress(b"[" + b" " * (2 << 20) + b"]"), "rows.json.gz")
    for refused in (
        page.get(f"/api/data/{key}/rows"),
        page.post(f"/api/data/{key}/versions", {"exclude": [1]}),
    ):
        assert refused.status_code == 400 and "larger than 1 MiB" in refused.text and ".jsonl" in refused.text


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.json.gz", "rows.csv.gz", "rows.txt.gz"])
def test_a_read_ends_at_its_timeout(page: Browser, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(data_routes, "ROW_SECONDS", 0.05)
    line = b'"' + b"x" * (1 << 20)  # without an end, in CSV as in JSON
    key = upload(page, gzip.compress(line * 100, 1), name)
    for query in ("offset=200000000", "row=200000000"):
        refused = page.get(f"/api/data/{key}/rows?limit=1&{query}")
        assert refused.status_code == 504 and "reading the file took more than 0.05 s" in refused.text


def test_reads_end_when_their_clients_leave() -> None:
    """A few run at a time, so that those behind them would wait."""
    begun, ended = [], []

    def work(check: Callable[[], object]) -> None:
        begun.append(1)
        try:
            while True:
                check()
        finally:
            ended.append(1)

    async def leave() -> dict[str, str]:
        await asyncio.sleep(0.5)
        return {"type": "http.disconnect"}

    async def reads() -> list[object]:
        runs, request = FileReads(), Request({"type": "http"}, leave)
        waiting = [runs.run(request, work, seconds=60) for _ in range(3 * AT_ONCE)]
        return await asyncio.gather(*waiting, return_exceptions=True)

    assert {type(each) for each in asyncio.run(reads())} == {ClientLeft}
    eventually(lambda: len(begun) == len(ended) == AT_ONCE)


def test_an_answer_has_a_bound_in_bytes(page: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "ANSWER", 1 << 20)
    rows = [{"text": "x"}, {"text": "y" * (1 << 20)}, {"text": "z"}]
    key = upload(page, "".join(json.dumps(row) + "\n" for row in rows).encode())
    found = page.get(f"/api/data/{key}/rows").json()["rows"]
    assert [row["value"] for row in found] == [rows[0], None, rows[2]]
    assert found[1]["problem"] == "not shown: an answer has at most 1 MiB of rows" and found[1]["text"] == ""


def test_a_removed_upload_is_kept_aside(page: Browser, tmp_path: Path) -> None:
    key = upload(page)
    assert page.send("DELETE", f"/api/data/{key}").status_code == 200
    assert page.get("/api/data").json()["data"] == []
    assert [path.read_bytes() for path in (tmp_path / "state" / "uploads").glob("removed-*/rows.jsonl")] == [CONTENT]


def test_who_may_see_uploads_nothing(make_page: Callable[..., Browser]) -> None:
    page = make_page(users=True).login("viewer")
    assert page.post("/api/uploads", {"name": "rows.jsonl", "size": 1}).status_code == 403
    assert page.get("/api/data").status_code == 200


@pytest.mark.slow  # each answer is a process that imports the models' library
def test_rows_are_shown_token_by_token_with_what_is_trained(page: Browser) -> None:
    key = upload(page)
    path = page.get(f"/api/uploads/{key}").json()["path"]
    job = f"task: sft\nmodel: llama-3m\ndata: {path}\nsteps: 1\ntrain: {{seq_len: 64}}\n"
    found = page.post("/api/rows", {"yaml": job, "offset": 5, "limit": 4}).json()
    assert (found["total"], len(found["rows"])) == (7, 2)
    tokens = found["rows"][0]["tokens"]
    assert "What is 6?" in "".join(token["text"] for token in tokens)
    assert "".join(token["text"] for token in tokens if token["trained"]).startswith("It is 6.")
    assert [token["special"] for token in tokens if token["text"] == "<|endoftext|>"] == [True]
    assert not any(token["special"] for token in tokens if token["text"] in ("What", " is"))


@pytest.mark.slow  # as above
def test_the_audit_and_the_plan_are_the_verbs_own(page: Browser) -> None:
    key = upload(page)
    path = page.get(f"/api/uploads/{key}").json()["path"]
    job = f"task: sft\nmodel: llama-3m\ndata: {path}\nsteps: 1\n"
    audit = page.post("/api/audit", {"yaml": job}).json()
    assert (audit["rows_in"], audit["rows_used"], audit["command"]) == (7, 7, "stoker data job.yaml")
    staged = job.replace("data:", "stages:\n  - name: one\n    data:").replace("steps: 1", "    steps: 1")
    audit = page.post("/api/audit", {"yaml": staged, "stage": "one"}).json()
    assert (audit["rows_in"], audit["command"]) == (7, "stoker data job.yaml --only one")
    assert page.post("/api/audit", {"yaml": staged, "stage": "--fix"}).status_code == 400
    plan = page.post("/api/plan", {"yaml": job, "on": "8xH100"}).json()
    assert plan["plan"]["fits"] and plan["command"] == "stoker plan job.yaml --on 8xH100"
    assert page.post("/api/plan", {"yaml": job, "on": "/etc/passwd"}).status_code == 400
    wrong = page.post("/api/audit", {"yaml": job.replace("steps: 1", "stepss: 1")})
    assert (wrong.status_code, wrong.json()["error"]["line"]) == (400, 4)
    key = upload(page, b"Frage,Antwort\nWie alt?,Zehn.\n", "c.csv")
    other = page.get(f"/api/uploads/{key}").json()
    error = page.post("/api/audit", {"yaml": job.replace(path, other["path"])}).json()["error"]
    needed = [["instruction", "Frage"], ["output", "Antwort"]]
    assert (error["key"], error["columns"]) == ("data[0].path", {"names": ["Frage", "Antwort"], "needed": needed})
