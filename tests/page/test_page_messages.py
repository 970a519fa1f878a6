"""What the page itself refuses is said in Chinese too: every template of an error has its own in `texts.zh.json`."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from browsing import Browser

from stoker.page import page_error
from stoker.page.app import STATIC
from stoker.page.jobs.job_keys import job_keys
from stoker.page.page_error import PageError, http_error, page_problem, problem_json

MODULES = sorted(Path(page_error.__file__).parent.rglob("*.py"))
# Functions that take templates, and where the first one is.
OWN = {"page_problem": 0, "bad_request": 0, "not_found": 0, "http_error": 1}
AT_START = {"accounts.py", "page_settings.py", "start_page.py"}  # their errors end `stoker ui` before there is a page
NOT_VALUES = {"hint", "retry_after"}
CHINESE = re.compile(r"[\u4e00-\u9fff]")


def zh() -> dict[str, str]:
    found: dict[str, str] = json.loads((STATIC / "texts.zh.json").read_text(encoding="utf-8"))
    return found


def named(template: str) -> set[str]:
    return set(re.findall(r"\{(\w+)\}", template))


def calls(path: Path) -> Iterator[tuple[str, list[str | None], set[str]]]:
    """Each call of a function that takes templates: its place, they (None: no literal), and the names of values."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for scope in ast.walk(tree):
        if not isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        literals: dict[str, list[object]] = {}  # a literal may be given a name in the function that uses it
        for each in ast.walk(scope):
            if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name):
                literals.setdefault(each.targets[0].id, []).append(getattr(each.value, "value", None))
        for call in ast.walk(scope):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in OWN:
                first = OWN[call.func.id]
                given = [*call.args[first : first + 2], *(each.value for each in call.keywords if each.arg == "hint")]
                texts = [text for each in given for text in _literals(each, literals)]
                values = {str(each.arg) for each in call.keywords} - NOT_VALUES
                yield f"{path.name}:{call.lineno}", texts, values


def _literals(node: ast.expr, named_ones: dict[str, list[object]]) -> list[str | None]:
    """The literal texts that an argument may be; None for what is none."""
    found = named_ones.get(node.id, [None]) if isinstance(node, ast.Name) else [getattr(node, "value", None)]
    return [each if isinstance(each, str) else None for each in found]


def templates() -> dict[str, str]:
    """The templates of all modules, each with a place where it is used."""
    return {
        text: place
        for path in MODULES
        if path.name != "page_error.py"
        for place, texts, _ in calls(path)
        for text in texts
        if text
    }


def test_errors_are_templates_with_their_values() -> None:
    for path in MODULES:
        if path.name == "page_error.py":
            continue
        for place, texts, values in calls(path):
            assert texts and None not in texts, f"{place}: write the message and the hint as literal texts"
            assert set().union(*(named(text or "") for text in texts)) == values, place


def test_every_error_is_said_in_chinese() -> None:
    table, used = zh(), templates()
    missing = {text: place for text, place in used.items() if text not in table}
    assert not missing, f"without Chinese in texts.zh.json: {json.dumps(missing, indent=1)}"
    for english in used:
        chinese = table[english]
        assert named(english) == named(chinese), english
        assert CHINESE.search(chinese) or english == chinese, english
    same = {english for english in used if english == table[english]}
    assert same == {"Content-Type: application/json", '[{"user_id": 7, ...}]', "[{role: user, content: ...}]"}


def test_no_module_makes_an_error_past_the_table() -> None:
    """`PageError` takes a problem that is there already; its words are those of another room, a verb or a server."""
    for path in MODULES:
        if path.name == "page_error.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            place = f"{path.name}:{node.lineno}"
            if node.func.id == "PageError":
                assert not isinstance(node.args[1], ast.Constant | ast.JoinedStr), place
            if node.func.id in ("Problem", "UserError") and path.name not in AT_START:
                texts = [each for each in ast.walk(node) if isinstance(each, ast.JoinedStr)]
                literal = node.args and isinstance(node.args[0], ast.Constant)
                assert not texts and not literal, f"{place}: use page_problem()"


def test_the_tests_above_find_what_they_look_for(tmp_path: Path) -> None:
    source = tmp_path / "x.py"
    source.write_text(
        "def f(n, x):\n    hint = 'b {n}'\n    raise bad_request('a {n}', hint, n=n)\n    hint = 'c'\n"
        "def g(x):\n    raise http_error(409, f'a {x}', retry_after=1)\n"
    )
    found = [(texts, values) for _, texts, values in calls(source)]
    assert found == [(["a {n}", "b {n}", "c"], {"n"}), ([None], set())]
    assert len(templates()) > 100


def test_an_error_has_its_text(page: Browser) -> None:
    assert page.get("/api/runs/0123456789abcdef").json()["error"]["message"] in zh()
    error = page.post("/api/uploads", {"name": "x" * 2000, "size": 1}).json()["error"]
    assert error["message"] == "`name` has more than 1,000 characters"


def test_a_problem_of_several_keys_is_marked_where_it_repeats(page: Browser) -> None:
    grpo = "grpo: {rewards: numeric, prompts: 2, answers: 2}\ntrain: {batch: 3}\n"
    job = f"task: grpo\nmodel: llama-3m\ndata: chatterbot-corpus\nsteps: 1\n{grpo}"
    problems = page.post("/api/check", {"yaml": job}).json()["problems"]
    assert sorted(problem["repeats"] for problem in problems) == [False, True, True]


def test_a_job_that_reaches_outside_has_its_place(page: Browser) -> None:
    found = page.post("/api/check", {"yaml": "task: sft\nmodel: llama-3m\ndata: /etc/passwd\n"}).json()
    (problem,) = (each for each in found["problems"] if "/etc/passwd" in each["message"])
    assert (problem["line"], problem["key"]) == (3, "data") and problem["hint"] in zh()


@pytest.mark.parametrize(("value", "shown"), [(1234567, "1,234,567"), (0.5, "0.5"), (600.0, "600"), ("1234", "1234")])
def test_numbers_are_written_for_people(value: str | int | float, shown: str) -> None:
    assert page_problem("{n} of {{n}", n=value).message == f"{shown} of {{{shown}"
    assert str(http_error(409, "a {n}", "b {n}", n=value)) == f"a {shown}; b {shown}"


def test_what_others_say_is_passed_on_as_it_is() -> None:
    assert problem_json(page_error.passed_on(400, "{n} is wrong").problem)["message"] == "{n} is wrong"
    assert isinstance(page_error.passed_on(502, "x"), PageError)
    refused = page_error.server_error(404, "no model s3://me:hush@host/x")
    assert (refused.status, refused.problem.message) == (400, "no model s3://me:***@host/x")


def test_keys_of_the_glossarys_tasks_are_keys_of_jobs() -> None:
    entries = json.loads((STATIC / "glossary.json").read_text(encoding="utf-8"))
    keys = {key["path"] for key in job_keys()}
    named = {entry["key"] for entry in entries if re.match(r"(train|evaluate|dpo|ppo|grpo)\.", entry["key"])}
    assert "ppo.critic_lr" in named and named <= keys, named - keys
