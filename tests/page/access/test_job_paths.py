"""What a job that comes through the page may name: no code without the role admin, no file outside of the folders."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from browsing import Browser, make_run

from stoker.page.access import job_paths
from stoker.page.access.accounts import Account
from stoker.page.access.job_paths import document_of, new_job_problems, path_problems

RUNNER, ADMIN = Account("runner", "run", ""), Account("boss", "admin", "")
START = "task: grpo\nmodel: llama-3m\ndata: chatterbot-corpus\n"
CODE = [
    'grpo: {rewards: "python:timeit:timeit"}',
    'grpo: {rewards: "python: timeit:timeit"}',
    'grpo: {environment: "python:os:system"}',
    'grpo: {rewards: {"python:timeit:timeit": 1.0}}',
    'grpo: {rewards: [numeric, "judge:http://10.0.0.1/v1"]}',
    'grpo: {rewards: {"judge:http://10.0.0.1/v1": 1.0}}',
    "ranking: {model: my-script:main}",
    "ranking.model: my-script:main",
    "stages: [{name: a, task: module}]",
    "export: {sync: {to: 'redis://:word@10.0.0.1:6379/0'}}",
    "export: {sync: {to: 'unix:///run/redis.sock'}}",
    "output: s3://bucket/run",
]
RUN_LATER = [  # by training only, so that the jobs of finished runs can be viewed
    "grpo: {rewards: code}",
    "grpo: {rewards: {'code:5': 1.0, exact: 1.0}}",
    "ranking: {servers: {addresses: ['10.0.0.1:29500'], secret: runs/word}}",
]
STAGES = "stages:\n- {name: a, steps: 1}\n- {name: b, task: ppo, ppo: {reward: %s, rewards: [code]}}\n"
OUTSIDE = [
    "ppo: {reward: private}",
    "ppo: {reward: kept}",
    "ppo: {critic: private, rewards: [exact]}",
    "ppo: {critic: ./private, rewards: [exact]}",
    "dpo: {reference: private}",
    "ranking: {servers: {addresses: ['10.0.0.1:29500'], secret: word}}",
    "grpo: {rewards: 'json_schema:private/secret.jsonl'}",
    "grpo: {rewards: {'json_schema:private/secret.jsonl': 1.0}}",
    "evaluate: {data: 'private/*.jsonl'}",
    "evaluate: {data: {path: 'private/secre[t].jsonl'}}",
    "evaluate: {data: [{path: 'private/secret{0..1}.jsonl'}]}",
    "evaluate: {data: '**/*.jsonl'}",
    "evaluate: {data: '*.jsonl'}",
    "evaluate: {data: ' private/secret.jsonl'}",
    "evaluate: {other: 'private/*.jsonl'}",
    'evaluate: {data: "private/[s\\n]ecret.jsonl"}',
    'evaluate: {data: [{path: "private/[s\\n]ecret.jsonl"}]}',
    "evaluate: {data: 'private/" + "[s]" * 1400 + "*.jsonl'}",
    "export: {sync: {to: 'lmdb:///home/victim/x'}}",
    "export: {sync: {to: 'lmdb://elsewhere/x'}}",
    "evaluate: {data: state/session.key}",
    "evaluate: {data: 'state/servers/*/token'}",
]
BY_LINKS = [
    "data_2: runs/mixed",
    "data_2: 'runs/mixed/*.jsonl'",
    "data_2: 'runs/**/*.jsonl'",
    "data_2: 'runs/*/deep/../*.jsonl'",
    "data_2: 'runs/mixed/below/*.jsonl'",
    "data_2: lmdb://runs/mixed",
    "data_2: [chatterbot-corpus, {path: runs/mixed}]",
    "evaluate: {data: runs/mixed}",
    "evaluate: {data: [{path: 'runs/mixed/s*'}]}",
    "dpo: {reference: runs/model}",
    "ppo: {reward: model}",
    "model_2: {name: runs/model}",
    "model_2: {name: 'runs/odd[1]'}",
]
INSIDE = [
    "grpo: {rewards: {numeric: 1.0, 'json_schema:runs/form.json': 0.5}}",
    "grpo: {rewards: [regex:abc]}",
    "stages:\n- {name: a, steps: 1}\n- {name: b, task: grpo, grpo: {rewards: [regex:abc]}}\n",
    "evaluate: {data: 'runs/*.jsonl'}",
    "evaluate: {data: 'runs/mixed/own*.jsonl'}",
    "evaluate: {data: 'runs/**/**/**/**/**/**/**/**/**/**/own.jsonl'}",
    "output: runs/mixed",
    "export: {sync: {to: 'lmdb://runs/one/rows'}}",
    "data_2: {template: '{{ content }}</s>'}",
    "data_2: {path: chatterbot-corpus, columns: {output: Antwort}}",
    "prompts: ['Is it yes/no? Say why.', 'judge: who is right?']",
    'data_2: {template: "{% if a/b %}\\n[{{ content }}]\\n{% endif %}"}',
    "evaluate: {data: {path: chatterbot-corpus, split: 'train[:10]'}}",
]


def _with_task(line: str) -> str:
    task = line.partition(":")[0]
    return START.replace("grpo", task if task in ("ppo", "dpo", "ranking") else "grpo") + line + "\n"


@pytest.fixture
def private(page: Browser, tmp_path: Path) -> Browser:
    """A page beside a folder that it was not given."""
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "secret.jsonl").write_text("{}\n")
    (tmp_path / "word").write_text("secret")
    (tmp_path / "runs").mkdir(exist_ok=True)
    (tmp_path / "runs" / "kept").symlink_to(tmp_path / "private")
    (tmp_path / "runs" / "mixed").mkdir()
    (tmp_path / "runs" / "mixed" / "own.jsonl").write_text("{}\n")
    return page


@pytest.mark.parametrize("line", CODE)
def test_what_runs_code_or_reaches_elsewhere_is_for_an_admin(private: Browser, line: str) -> None:
    document = document_of(START + line + "\n")
    for account in (RUNNER, None):
        found = path_problems(document, private.settings, account)
        assert len(found) == 1 and "requires the role admin" in found[0].message and found[0].line == 4, found
        assert "word" not in found[0].message
    assert not path_problems(document, private.settings, ADMIN)


@pytest.mark.parametrize("reward", ["python:timeit:timeit", "judge:http://10.0.0.1/v1"])
def test_a_run_may_be_opened_whatever_scored_it(private: Browser, reward: str) -> None:
    document = document_of(f"{START}grpo: {{rewards: ['{reward}']}}\n")
    assert path_problems(document, private.settings, None)
    assert not path_problems(document, private.settings, None, scores=False)


@pytest.mark.parametrize("line", RUN_LATER)
def test_code_in_the_sandbox_and_servers_of_rows_are_for_an_admin(private: Browser, line: str) -> None:
    document = document_of(_with_task(line))
    [problem] = path_problems(document, private.settings, RUNNER)
    assert "requires the role admin" in problem.message and problem.line == 4
    assert not path_problems(document, private.settings, ADMIN)
    assert not path_problems(document, private.settings, None)


def test_stages_that_name_code_are_for_an_admin(private: Browser) -> None:
    document = document_of(f"model: llama-3m\ndata: chatterbot-corpus\ntask: reward\n{STAGES % 'a'}")
    [problem] = path_problems(document, private.settings, RUNNER)
    assert problem.key == "stages[1].ppo.rewards" and problem.line == 6
    assert not path_problems(document, private.settings, ADMIN)
    unknown = document_of(f"model: llama-3m\ndata: chatterbot-corpus\ntask: reward\n{STAGES % 'b'}")
    assert path_problems(unknown, private.settings, RUNNER)  # a stage that uses itself: its names are not known


@pytest.mark.parametrize("line", OUTSIDE)
def test_no_file_outside_of_the_folders_is_named(private: Browser, line: str) -> None:
    for account in (RUNNER, ADMIN):
        found = path_problems(document_of(_with_task(line)), private.settings, account)
        found = [each for each in found if "admin" not in each.message]
        assert len(found) == 1 and "is not in a folder" in found[0].message and found[0].line == 4, found


@pytest.mark.parametrize("line", BY_LINKS)
def test_no_file_outside_is_named_through_a_link_in_a_folder(private: Browser, tmp_path: Path, line: str) -> None:
    for link, target in (("mixed/secret.jsonl", "secret.jsonl"), ("mixed/below", ""), ("model/model.safetensors", "x")):
        (tmp_path / "runs" / link).parent.mkdir(exist_ok=True)
        (tmp_path / "runs" / link).symlink_to(tmp_path / "private" / target)
    (tmp_path / "runs" / "odd[1]").symlink_to(tmp_path / "private")
    (tmp_path / "runs" / "mixed" / "deep").mkdir()
    for account in (RUNNER, ADMIN):
        [problem] = path_problems(document_of(_with_task(line)), private.settings, account)
        assert re.search("is not in a folder|leads through a link out", problem.message) and problem.line == 4


@pytest.mark.parametrize("path", ["/**/*.jsonl", "private", "runs/kept/**"])
def test_no_folder_outside_is_searched(private: Browser, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    searched: list[str] = []

    def search(name: str, _: Path) -> list[Path]:
        searched.append(name)
        return []

    monkeypatch.setattr(job_paths, "candidate_files", search)
    document = document_of(f"task: sft\nmodel: llama-3m\ndata: '{path}'\n")
    [problem] = new_job_problems(document, private.settings, RUNNER)
    assert (problem.line, searched) == (3, [])


@pytest.mark.parametrize("line", INSIDE)
def test_what_is_inside_is_allowed(private: Browser, line: str) -> None:
    assert not path_problems(document_of(START + line + "\n"), private.settings, RUNNER)


def test_a_malformed_address_is_a_problem_at_its_line(private: Browser) -> None:
    [problem] = path_problems(document_of(START + "evaluate: {data: 'https://[x?token=y'}\n"), private.settings, RUNNER)
    assert problem.line == 4 and "https://[x`" in problem.message


def test_words_of_an_evaluation_name_no_file(make_page: Callable[..., Browser], tmp_path: Path) -> None:
    job = make_run(tmp_path / "runs" / "one") / "job.yaml"
    job.write_text("task: sft\nmodel: llama-3m\ndata: chatterbot-corpus\n")
    (tmp_path / "secret.jsonl").write_text(json.dumps({"const": "4711"}))
    page = make_page(users=True).login("runner")
    run = page.get("/api/runs").json()["runs"][0]["id"]
    for options in ({"tasks": ["mine.yml"]}, {"score": ["json_schema:secret.jsonl"]}):
        found = page.post("/api/actions", {"verb": "eval", "run": run, "options": options})
        assert found.status_code in (400, 403), found.text
    assert page.get("/api/actions").json()["actions"] == []
