"""Rows token by token: what verbs say of a window, by rows and packed, and with losses."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from browsing import Browser, make_run

from stoker.page.processes.run_verb import VerbResult, Verbs
from stoker.page.run_data.run_index import id_of

ROW = {"source": "rows.jsonl", "row": 4, "verdict": "", "lost": 9, "continues": False, "expected": "b"}
SAMPLE = {**ROW, "ids": [5, 6], "tokens": ["a", "b"], "trained": [False, True], "special": [False, False]}
SHOWN = {
    **ROW,
    "tokens": [
        {"id": 5, "text": "a", "trained": False, "special": False},
        {"id": 6, "text": "b", "trained": True, "special": False},
    ],
}
PACKED = {"number": 3, "capacity": 8, "tokens": 2, "documents": [SAMPLE]}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The verbs that were started; each answers what a real one would."""
    words: list[list[str]] = []

    async def run(_: Verbs, arguments: Sequence[str], **more: Any) -> VerbResult:
        words.append(list(arguments))
        if "--at" in arguments and arguments[arguments.index("--at") + 1] == "7":
            return VerbResult(2, None, "error: runs/one has no checkpoint '7'\n")
        measured = {"step": 5, "loss": 0.5, "tokens": 1, "sequences": 40, "packed_sequences": 12}
        sample = {**SAMPLE, "loss": [None, 0.5]} if arguments[0] == "eval" else SAMPLE
        if "--packed" in arguments:
            shown: dict[str, Any] = {"samples": [], "packed": [{**PACKED, "documents": [sample]}]}
        else:
            shown = {"samples": [sample]}
        return VerbResult(0, {"ok": True, **measured, **shown}, "")

    monkeypatch.setattr(Verbs, "run", run)
    return words


@pytest.fixture
def run(page: Browser, tmp_path: Path) -> str:
    folder = make_run(tmp_path / "runs" / "one")
    (folder / "job.yaml").write_text("task: sft\nmodel: llama-3m\ndata: chatterbot-corpus\nsteps: 5\n")
    for step in ("00000005", "00000010"):
        (folder / "checkpoints" / f"step-{step}").mkdir(parents=True)
    (folder / "checkpoints" / ".partial-step-00000012-x.1.2").mkdir()
    page.page.runs.forget()
    return f"/api/runs/{id_of(folder)}"


def test_rows_say_where_they_were_cut(page: Browser, asked: list[list[str]]) -> None:
    found = page.post("/api/rows", {"yaml": "task: sft\ndata: chatterbot-corpus\n", "offset": 3, "limit": 5}).json()
    assert found == {"total": 40, "rows": [SHOWN], "command": "stoker data job.yaml --samples 5 --offset 3"}
    assert asked[0][2:] == ["--json", "--samples", "5", "--offset", "3"]


@pytest.mark.parametrize("packed", [False, True])
def test_rows_that_are_all_dropped_have_the_reason(
    page: Browser, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    error = {"message": "all of its 2 rows are dropped", "key": "data[0].path", "file": "job.yaml", "line": 2}
    said = {"ok": False, "errors": [error], "sequences": 0, "samples": [], "packed": [], "packed_sequences": 0}

    async def run(*_: Any, **__: Any) -> VerbResult:
        return VerbResult(2, said, "")

    monkeypatch.setattr(Verbs, "run", run)
    found = page.post("/api/rows", {"yaml": "task: sft\ndata: chatterbot-corpus\n", "packed": packed})
    assert found.status_code == 400 and error["message"] in found.text


def test_packed_sequences_have_their_rows(page: Browser, run: str, asked: list[list[str]]) -> None:
    body = {"yaml": "task: sft\ndata: chatterbot-corpus\n", "packed": True}
    found = page.post("/api/rows", body).json()
    assert found["total"] == 12 and found["command"].endswith("--samples 50 --offset 0 --packed")
    assert found["sequences"] == [{"number": 3, "capacity": 8, "tokens": 2, "rows": [SHOWN]}]
    assert page.get(f"{run}/rows?packed=1&limit=2").json() == {
        **found,
        "command": "stoker data job.yaml --samples 2 --offset 0 --packed",
        "checkpoints": [5, 10],
    }
    assert page.get(f"{run}/rows?packed=maybe").status_code == 400


@pytest.mark.parametrize(("to", "listed"), [("runs/elsewhere", [20]), ("s3://corpora/checkpoints", None)])
def test_checkpoints_are_listed_where_the_run_writes_them(
    make_page: Callable[..., Browser], asked: list[list[str]], tmp_path: Path, to: str, listed: list[int] | None
) -> None:
    folder = make_run(tmp_path / "runs" / "one")
    job = {"task": "sft", "model": "llama-3m", "data": "chatterbot-corpus", "steps": 5, "checkpoint": {"to": to}}
    (folder / "job.yaml").write_text(json.dumps(job))
    (folder / "checkpoints" / "step-00000005").mkdir(parents=True)
    (tmp_path / "runs" / "elsewhere" / "step-00000020").mkdir(parents=True)
    page = make_page(urls=("s3://corpora",)).begin()
    assert page.get(f"/api/runs/{id_of(folder)}/rows").json()["checkpoints"] == listed


def test_losses_are_those_of_the_verb_that_is_shown(page: Browser, run: str, asked: list[list[str]]) -> None:
    found = page.post(f"{run}/token-losses", {"offset": 20, "limit": 10, "packed": True, "at": "best"}).json()
    assert asked == [["eval", "runs/one", "--by-token", "10", "--offset", "20", "--packed", "--at", "best", "--json"]]
    assert found["command"] == "stoker eval runs/one --by-token 10 --offset 20 --packed --at best"
    assert (found["step"], found["loss"], found["tokens"]) == (5, 0.5, 1)
    assert [token["loss"] for token in found["sequences"][0]["rows"][0]["tokens"]] == [None, 0.5]
    assert page.post(f"{run}/token-losses", {}).json()["rows"][0]["lost"] == 9
    error = page.post(f"{run}/token-losses", {"at": "7"})
    assert error.status_code == 400 and error.json()["error"]["message"] == "runs/one has no checkpoint '7'"


@pytest.mark.parametrize(
    "body", [{"at": "--to=x"}, {"at": "../x"}, {"at": "a/../x"}, {"limit": 0}, {"limit": 201}, {"packed": "x"}]
)
def test_nothing_else_is_passed_on(page: Browser, run: str, asked: list[list[str]], body: dict[str, Any]) -> None:
    assert page.post(f"{run}/token-losses", body).status_code == 400
    assert not asked


def test_a_plan_is_for_this_machine_a_cluster_or_a_file_of_the_page(
    make_page: Callable[..., Browser], asked: list[list[str]], tmp_path: Path
) -> None:
    for name in ("secret.yaml", "given/lab.yaml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("nodes: 1\n")
    page = make_page(data=((tmp_path / "given").resolve(),)).begin()
    make_run(tmp_path / "runs" / "one")
    page.page.runs.forget()
    body, run = {"yaml": "task: sft\ndata: chatterbot-corpus\n"}, f"/api/runs/{id_of(tmp_path / 'runs' / 'one')}/plan"
    for on in ("secret.yaml", "given/../secret.yaml", "/etc/passwd", "--json"):
        assert page.post("/api/plan", {**body, "on": on}).status_code == 400, on
        assert page.get(run, params={"on": on}).status_code == 400, on
    assert not asked
    given = ("local", "4x8xH100", "given/lab.yaml")
    assert [page.post("/api/plan", {**body, "on": on}).status_code for on in given] == [200] * 3
    assert [words[2:] for words in asked] == [["--json", "--cluster-only", "--on", on] for on in given]


def test_who_only_sees_measures_nothing(
    make_page: Callable[..., Browser], asked: list[list[str]], tmp_path: Path
) -> None:
    folder = make_run(tmp_path / "runs" / "one")
    page = make_page(users=True).login("viewer")
    assert page.post(f"/api/runs/{id_of(folder)}/token-losses", {}).status_code == 403 and not asked


def test_the_loss_of_code_of_others_is_not_measured(
    page: Browser, run: str, asked: list[list[str]], tmp_path: Path
) -> None:
    code = {"task": "sft", "model": {"name": "x", "trust_remote_code": True}, "data": "chatterbot-corpus"}
    (tmp_path / "runs" / "one" / "job.yaml").write_text(json.dumps(code))
    assert page.post(f"{run}/token-losses", {}).status_code == 403 and not asked


@pytest.mark.parametrize(("kind", "words"), [("fifo", "a FIFO"), ("link", "a link"), ("none", "no such file")])
@pytest.mark.parametrize("part", ["plan", "rows", "audit", "rollouts"])
def test_a_job_that_is_no_file_is_said_to_be_none(
    page: Browser, tmp_path: Path, kind: str, words: str, part: str
) -> None:
    job = make_run(tmp_path / "runs" / "one") / "job.yaml"
    job.unlink()
    if kind == "fifo":
        os.mkfifo(job)
    elif kind == "link":
        job.symlink_to("/etc/passwd")
    page.page.runs.forget()
    found = page.get(f"/api/runs/{id_of(job.parent)}/{part}")
    assert found.status_code == 400 and words in found.json()["error"]["message"]
