"""A judge behind a server of the test: both orders, ties, a token, failures, and no contact unless asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from stoker.errors import RunFailed, UserError
from stoker.scoring import judge as judging
from stoker.scoring.answer_rows import AnswerRow
from stoker.scoring.judge import TOKEN, Judge, open_judge
from stoker.scoring.scorers import scorer_of


class FakeJudge(HTTPServer):
    """Answers chat completions with what ``verdict`` makes of the prompt."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.verdict: Callable[[str], str] = lambda prompt: "VERDICT: TIE"
        self.status = 200
        self.refusals: list[tuple[int, str]] = []  # statuses and values of Retry-After of the first answers
        self.page = b""  # instead of JSON
        self.asked: list[dict[str, Any]] = []
        self.tokens: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    """The two addresses that a judge is asked at."""

    server: FakeJudge

    def do_GET(self) -> None:
        self.give({"data": [{"id": "first"}, {"id": "second"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        text = self.server.verdict(body["messages"][0]["content"])
        self.give({"choices": [{"message": {"content": text}}]})

    def give(self, content: dict[str, Any]) -> None:
        self.server.tokens.append(self.headers.get("Authorization"))
        if self.server.refusals:
            status, seconds = self.server.refusals.pop(0)
            self.send_response(status)
            self.send_header("Retry-After", seconds)
            self.end_headers()
            return
        self.send_response(self.server.status)
        if self.server.status == 302:
            self.send_header("Location", f"{self.server.url}/models")
        self.end_headers()
        self.wfile.write(self.server.page or json.dumps(content).encode())

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeJudge]:
    monkeypatch.setattr(judging, "WAIT", 0.0)
    monkeypatch.delenv(TOKEN, raising=False)
    with FakeJudge() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def answer_a(prompt: str) -> str:
    return prompt.split("[Answer A]\n")[1].split("\n", maxsplit=1)[0]


@pytest.mark.parametrize(
    ("verdict", "name", "score"),
    [
        (lambda prompt: "VERDICT: A" if answer_a(prompt) == "good" else "VERDICT: B", "win", 1.0),
        (lambda prompt: "VERDICT: B" if answer_a(prompt) == "good" else "VERDICT: A", "loss", 0.0),
        (lambda prompt: "Both. VERDICT: TIE", "tie", 0.5),
        (lambda prompt: "**Verdict**: A tie.", "tie", 0.5),
        (lambda prompt: "VERDICT: A", "contradictory", 0.5),  # whatever comes first
        (lambda prompt: "I cannot say", "unclear", 0.5),
        (lambda prompt: prompt, "unclear", 0.5),  # repeats the three choices, and takes none
        (lambda prompt: f"{prompt}\nVERDICT: {'A' if answer_a(prompt) == 'good' else 'B'}", "win", 1.0),
        (lambda prompt: "A" if answer_a(prompt) == "good" else "**B**", "win", 1.0),
        (lambda prompt: f"verdict: TIE? No. Verdict: {'B' if answer_a(prompt) == 'good' else 'A'}", "loss", 0.0),
    ],
)
def test_both_orders_decide(verdict: Callable[[str], str], name: str, score: float, server: FakeJudge) -> None:
    server.verdict = verdict
    found = open_judge(f"{server.url},mine").compare("Why?", "good", "bad")
    assert (found.name, found.score) == (name, score)
    assert [answer_a(body["messages"][0]["content"]) for body in server.asked] == ["good", "bad"]
    assert all(body["model"] == "mine" and body["temperature"] == 0 for body in server.asked)


def test_without_a_model_it_is_the_first_that_is_listed(server: FakeJudge) -> None:
    assert open_judge(server.url) == Judge(server.url, "first")


def test_a_named_judge_is_not_contacted_before_it_judges(server: FakeJudge) -> None:
    open_judge(f"{server.url},mine")
    assert not server.tokens


def test_the_token_comes_from_the_environment(server: FakeJudge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "secret")
    open_judge(server.url)
    assert server.tokens == ["Bearer secret"]


@pytest.mark.parametrize("page", [b"<html>", b"[" * 100_000, b'{"choices": []' + b" " * 1000 + b"}"])
def test_an_answer_that_is_a_web_page_or_too_large_is_said_to_be_no_json(
    page: bytes, server: FakeJudge, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.page = page
    if page.endswith(b"}"):
        monkeypatch.setattr(judging, "LARGEST", 1000)
    with pytest.raises(RunFailed, match="cannot be asked: its answer is not JSON"):
        open_judge(f"{server.url},mine").compare("Why?", "good", "bad")


@pytest.mark.parametrize(("status", "times"), [(401, 1), (302, 1), (500, 3), (503, 3), (429, 3)])
def test_a_failing_judge_is_asked_again_only_where_that_may_help(status: int, times: int, server: FakeJudge) -> None:
    server.status = status
    with pytest.raises(RunFailed, match=str(status)):
        open_judge(f"{server.url},mine").compare("Why?", "good", "bad")
    assert len(server.tokens) == times


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that a judge's caller would have slept."""
    seconds: list[float] = []
    monkeypatch.setattr(judging.time, "sleep", seconds.append)
    monkeypatch.setattr(judging, "WAIT", 2.0)
    return seconds


def test_a_busy_judge_is_asked_again_when_it_says(server: FakeJudge, waits: list[float]) -> None:
    in_ten = format_datetime(datetime.now(UTC) + timedelta(seconds=10), usegmt=True)
    stated = ["0.5", "7", "86400", "-3", in_ten, "soon", "nan"]
    server.refusals = [(429, each) for each in stated[:5]] + [(503, "3")]
    open_judge(f"{server.url},mine").compare("Why?", "good", "bad")
    assert waits[:4] == [0.5, 7, 60, 0] and 8 < waits[4] <= 10 and waits[5:] == [3]
    waits.clear()
    server.refusals = [(429, each) for each in stated[5:]]
    open_judge(f"{server.url},mine").compare("Why?", "good", "bad")
    assert waits == [2, 4]


@pytest.mark.parametrize(("status", "times"), [(429, 10), (503, 10), (500, 3), (400, 1)])
def test_a_judge_that_stays_busy_is_given_up(status: int, times: int, server: FakeJudge, waits: list[float]) -> None:
    server.refusals = [(status, "1")] * 20
    with pytest.raises(RunFailed, match=f"answered {status}"):
        open_judge(f"{server.url},mine").compare("Why?", "good", "bad")
    assert len(server.tokens) == times


def test_the_reason_of_a_refusal_and_the_row_are_said(server: FakeJudge) -> None:
    server.status = 400
    server.page = json.dumps({"error": {"message": "the prompt has 300 tokens,\n and the model 128"}}).encode()
    row = AnswerRow("mine.jsonl", 3, ({"role": "user", "content": "Why?"},), "bad", (), {})
    with pytest.raises(RunFailed, match=r"mine.jsonl:3: the judge .* answered 400 Bad Request: the prompt .*, and the"):
        scorer_of(f"judge:{server.url},mine", Path()).score("good", row)


@pytest.mark.parametrize(
    "url", ["http://h:abc/v1", "http://h:99999/v1", "http://[::1/v1", "http://h/v 1", "http://h/\tv1", "http:///v1"]
)
def test_an_address_that_is_none_is_an_error_of_the_user(url: str) -> None:
    with pytest.raises(UserError, match="is not an address of a judge"):
        open_judge(f"{url},mine")


@pytest.mark.parametrize("said", [b"SSH-2.0-OpenSSH_9.6\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"])
def test_what_is_no_answer_of_a_judge_is_said(said: bytes, server: FakeJudge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handler, "give", lambda self, _: self.wfile.write(said))
    with pytest.raises(RunFailed, match=r"the judge at http://\S+ cannot be asked: "):
        open_judge(f"{server.url},mine").compare("Why?", "good", "bad")
