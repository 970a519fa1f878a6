"""Stores elsewhere that a page's jobs may name: what was listed is used, and nothing else is asked of anybody."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from browsing import PATIENCE, Browser, make_run
from moto.server import ThreadedMotoServer

from stoker.cli.main import main
from stoker.page.access.accounts import Account
from stoker.page.access.job_paths import document_of, path_problems
from stoker.page.access.listed_urls import is_listed, listing_problem

pytestmark = pytest.mark.usefixtures("warm_processes")

LISTED = (
    "s3://corpora/chat",
    "redis://store:6379/0",
    "https://files.example/data/",
    "s3://whole",
    "abfs://rows@account.dfs.core.windows.net/chat",
)
BELOW = [
    "s3://corpora/chat",
    "s3://corpora/chat/",
    "s3://corpora/chat/a-{000..063}.tar",
    "s3://corpora/chat/*.jsonl",
    "S3://corpora/chat/a.jsonl",
    "s3://whole/x",
    "abfs://rows@account.dfs.core.windows.net/chat/a.jsonl",
    "redis://store:6379/0",
    "redis://:word@store:6379/0",
    "redis://store:6379/0?prefix=team:a",
    "https://files.example/data/a.jsonl?X-Amz-Signature=1",
    "https://FILES.example/data/a.jsonl",
]
ELSEWHERE = [
    "s3://corpora/chatter/a.jsonl",
    "s3://corpora/other",
    "s3://corpora",
    "s3://corpora/chat/../other",
    "s3://corpora/chat/{a,../../other}",
    "s3://me@corpora/chat",
    "s3://@corpora/chat",
    "s3://corpora2/chat/a",
    "s3://corp*/chat/a",
    "s3a://corpora/chat/a",
    "gs://corpora/chat/a",
    "abfs://other@account.dfs.core.windows.net/chat/a.jsonl",
    "abfs://account.dfs.core.windows.net/chat/a.jsonl",
    "redis://store:6379/0/5",
    "redis://store:6379/",
    "redis://store:6379/1",
    "redis://store:6379/0?ssl_ca_certs=/etc/passwd",
    "redis://store:6379/0?prefix=a&db=1",
    "redis://store:6379/0?db=1",
    "redis://store:6379/0?prefix=a#b",
    "redis://store:6380/0",
    "redis://store/0",
    "rediss://store:6379/0",
    "redis://store:6379@evil:6379/0",
    "redis://evil:6379/0#@store:6379/0",
    "http://files.example/data/a",
    "https://files.example/data/../secret",
    "https://files.example/data/%2e%2e/secret",
    "https://files.example/data/%252e%252e/secret",
    "https://files.example/data\\@evil/",
    "https://files.example@evil/data/a",
    "https://evil#@files.example/data/a",
    "https://evil?@files.example/data/a",
    "https://files.example:444/data/a",
    "https://files.example.evil/data/a",
    "https://files.example/database",
    "simplecache::s3://corpora/chat/a",
    "s3://corpora/chat/a::https://evil/",
    "http://169.254.169.254/latest/meta-data",
    "file:///etc/passwd",
    "/etc/passwd",
    "lmdb:///x",
]
RUNNER, ADMIN = Account("runner", "run", ""), Account("boss", "admin", "")


@pytest.mark.parametrize("url", BELOW)
def test_what_lies_below_a_listed_url_is_listed(url: str) -> None:
    assert is_listed(url, LISTED)


@pytest.mark.parametrize("url", ELSEWHERE)
def test_no_spelling_leads_elsewhere(url: str) -> None:
    assert not is_listed(url, LISTED)


@pytest.mark.parametrize(
    "url", ["corpora", "s3://", "file:///x", "https:///x", "s3://a/../b", "redis://h/0?a=1", "zip://a::s3://b"]
)
def test_a_page_takes_no_url_that_names_no_place(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert listing_problem(url)
    assert main(["ui", "--port", "0", "--urls", "s3://fine/x", url]) == 2
    assert "--urls: " in capsys.readouterr().err
    assert not listing_problem("unix:///run/redis.sock") and not listing_problem("redis://:word@h:1/0")


@pytest.mark.parametrize(
    "line",
    [
        "data: {url}",
        "data: [{{path: '{url}'}}]",
        "model: {url}",
        "checkpoint: {{to: '{url}'}}",
        "evaluate: {{data: '{url}'}}",
    ],
)
def test_a_job_may_name_what_is_listed(make_page: Callable[..., Browser], line: str) -> None:
    settings = make_page(urls=LISTED).settings
    for url, account, count in (
        ("s3://corpora/chat/a.jsonl", RUNNER, 0),
        ("s3://corpora/chat/a.jsonl", None, 0),
        ("s3://elsewhere/a.jsonl", RUNNER, 1),
        ("s3://elsewhere/a.jsonl", None, 1),
        ("s3://elsewhere/a.jsonl", ADMIN, 0),
        ("simplecache::s3://corpora/chat/a", ADMIN, 1),
    ):
        found = path_problems(document_of("task: sft\n" + line.format(url=url) + "\n"), settings, account)
        assert len(found) == count and all(problem.line == 2 for problem in found), (url, found)


def test_a_listed_redis_is_written_to_without_an_admin(make_page: Callable[..., Browser]) -> None:
    settings = make_page(urls=LISTED).settings
    for url, count in (("redis://:word@store:6379/0", 0), ("redis://:word@elsewhere:6379/0", 1)):
        found = path_problems(document_of(f"export: {{sync: {{to: '{url}'}}}}\n"), settings, RUNNER)
        assert len(found) == count and "word" not in str(found)


@pytest.fixture
def trap() -> Iterator[tuple[str, list[str]]]:
    """A server that should not be asked, and what it was asked."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/rows.jsonl", asked
    server.shutdown()
    thread.join()


def test_what_is_not_listed_is_asked_of_nobody(
    make_page: Callable[..., Browser], tmp_path: Path, trap: tuple[str, list[str]]
) -> None:
    url, asked = trap
    run = make_run(tmp_path / "runs" / "one")
    text = f"task: sft\nmodel: llama-3m\ndata: {url}\nsteps: 1\n"
    (run / "job.yaml").write_text(text)
    page = make_page(users=True, urls=("http://127.0.0.1:1/",)).login("runner")
    (key,) = (each["id"] for each in page.get("/api/runs").json()["runs"])
    answers = [page.post(f"/api/{verb}", {"yaml": text}) for verb in ("audit", "rows", "plan", "jobs")]
    answers += [page.get(f"/api/runs/{key}/{what}") for what in ("audit", "rows", "plan")]
    answers.append(page.post(f"/api/runs/{key}/resume"))
    answers.append(page.post("/api/actions", {"verb": "eval", "run": key, "options": {"data": url}}))
    answers.append(page.post("/api/chat", {"run": key, "messages": [{"role": "user", "content": "a"}]}))
    assert [answer.status_code for answer in answers] == [403] * len(answers), [answer.text for answer in answers]
    checked = page.post("/api/check", {"yaml": text}).json()
    assert [problem["line"] for problem in checked["problems"]] == [3] and "--urls" in checked["problems"][0]["hint"]
    assert not asked


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """An S3 store by moto's server, which verbs ask as the command line does."""
    import boto3

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, "us-east-1" if "REGION" in name else "test")
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "cache"))
    made = boto3.resource("s3").Bucket("corpora")
    made.create()
    rows = [{"prompt": f"What is {n} plus {n}?", "completion": f"It is {2 * n}."} for n in range(20)]
    made.put_object(Key="chat/rows.jsonl", Body="".join(json.dumps(row) + "\n" for row in rows).encode())
    yield made
    server.stop()


def trained(page: Browser, text: str, name: str) -> str:
    """The id of a run that was started through the page and has ended."""
    begun = page.post("/api/jobs", {"yaml": text, "name": name}).json()
    until = time.monotonic() + PATIENCE
    while (run := page.get(f"/api/runs/{begun['id']}").json())["status"] != "done":
        assert run["status"] in ("queued", "starting", "running") and time.monotonic() < until, run
        time.sleep(0.5)
    return str(begun["id"])


@pytest.mark.exhaustive  # verbs as processes of their own, training and a server of the model, a minute
def test_data_and_checkpoints_in_a_listed_bucket_are_used(
    make_page: Callable[..., Browser], tmp_path: Path, bucket: Any
) -> None:
    text = "task: sft\nmodel: llama-3m\ndata: s3://corpora/chat/rows.jsonl\nsteps: 2\ntrain: {batch: 2, seq_len: 64}\n"
    text += "checkpoint: {to: s3://corpora/chat/checkpoints}\n"
    page = make_page(users=True, urls=("s3://corpora/chat",)).login("runner")
    assert page.post("/api/check", {"yaml": text}).json()["problems"] == []
    key = trained(page, text, "one")
    assert [each.key for each in bucket.objects.all() if each.key.startswith("chat/checkpoints/")]
    assert not list((tmp_path / "runs/one").glob("checkpoints/*/*.safetensors"))
    for answer in (page.post("/api/audit", {"yaml": text}), page.get(f"/api/runs/{key}/audit")):
        found = answer.json()
        assert answer.status_code == 200 and (found["rows_in"], found["rows_used"]) == (20, 20), found
    rows = page.get(f"/api/runs/{key}/rows?limit=2").json()
    assert len(rows["rows"]) == 2 and rows["rows"][0]["source"].endswith("chat/rows.jsonl")
    assert page.post("/api/plan", {"yaml": text}).json()["plan"]["step_time_s"] > 0
    question = {"run": key, "messages": [{"role": "user", "content": "What is 2 plus 2?"}], "max_tokens": 4}
    assert '"done": true' in page.post("/api/chat", question).text


@pytest.mark.slow  # a training and its store, 30 s
def test_a_run_of_any_user_writes_to_a_listed_redis_and_is_looked_at(
    make_page: Callable[..., Browser], tmp_path: Path, redis_place: str
) -> None:
    import redis

    rows = ({"clicked": n % 3 // 2, "user_id": n % 7, "item_id": f"i{n % 5}"} for n in range(120))
    page = make_page(users=True, urls=(redis_place,)).login("runner")
    (tmp_path / "runs" / "shop.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = "task: ranking\ndata: runs/shop.jsonl\nranking: {label: clicked, width: 4, hidden: [8]}\nsteps: 4\n"
    text += f"train: {{batch: 12}}\nexport: {{sync: {{to: '{redis_place}?prefix=shop', every_steps: 2}}}}\n"
    assert page.post("/api/audit", {"yaml": text}).json()["rows_in"] == 120
    key = trained(page, text, "shop")
    with redis.Redis.from_url(redis_place) as client:
        assert client.keys("shop:*")
    assert page.get(f"/api/runs/{key}/audit").json()["rows_in"] == 120
    assert page.get(f"/api/runs/{key}/plan").status_code == 200
    other = text.replace(redis_place, redis_place.replace("/0", "/1"))
    assert page.post("/api/jobs", {"yaml": other, "name": "other"}).status_code == 403
