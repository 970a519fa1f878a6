"""Every scorer against closed forms or its library."""

from __future__ import annotations

import json
import pickle
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stoker.errors import UserError
from stoker.resilience.stop_signals import SignalExit, exit_at_signals
from stoker.scoring import json_schema
from stoker.scoring.answer_rows import AnswerRow, read_answer_rows
from stoker.scoring.expected_check import expected_check
from stoker.scoring.patterns import is_found
from stoker.scoring.program_tests import program_of
from stoker.scoring.sandbox import sandbox_problem
from stoker.scoring.scorer import COMPARING, COMPARING_WITHOUT_ARGUMENT, SCORERS, needs_expected
from stoker.scoring.scorers import MAKERS, last_number, normalised, scorer_of, scorer_problem, scorers_of
from stoker.scoring.unicode_words import UnicodeWords


def row(expected: object = None, scorers: tuple[str, ...] = (), **fields: object) -> AnswerRow:
    turns = ({"role": "user", "content": "Why?"},)
    return AnswerRow("rows.jsonl", 7, turns, expected, scorers, fields)


def score(name: str, answer: str, expected: object = None, base: Path = Path()) -> float:
    return scorer_of(name, base).score(answer, row(expected)).value


@pytest.mark.parametrize(
    ("name", "answer", "expected", "right"),
    [
        ("exact", " Paris\n", "Paris", True),
        ("exact", "paris", "Paris", False),
        ("exact", "Lyon", ["Paris", "Lyon"], True),
        ("exact", "5", 5, True),
        ("normalised", "The  Eiffel-Tower!", "eiffeltower", True),
        ("normalised", "an apple", "the Apple.", True),
        ("normalised", "apples", "apple", False),
        ("normalised", "", "A", False),
        ("normalised", "the", "A", False),
        ("normalised", "a.", "A", True),
        ("normalised", "", "!", False),
        ("normalised", " ! ", "!", True),
        ("normalised", "\u300c東京\u300d\u3002", "東京", True),
        ("regex:^[A-D]$", "B", None, True),
        ("regex:^[A-D]$", "B.", None, False),
        ("regex", "It is 42.", r"\b42\b", True),
        ("regex", "It is 421.", [r"\b42\b", "nothing"], False),
        ("numeric", "So 3 + 4 = 7.", 7, True),
        ("numeric", "about 1,234.5 metres", "1234.5", True),
        ("numeric:0.1", "0.4", 0.3, True),
        ("numeric:0.1", "0.31", 0.2, False),
        ("numeric:1%", "101", 100, True),
        ("numeric:1%", "-101", -100, True),
        ("numeric:1%", "102", 100, False),
        ("numeric", "none", 3, False),
        ("json_schema", '{"a": 1}', {"type": "object", "required": ["a"]}, True),
        ("json_schema", '{"b": 1}', '{"type": "object", "required": ["a"]}', False),
        ("json_schema", "```json\n[1]\n```", {"type": "array"}, True),
        ("json_schema", "```\n[1]```", {"type": "array"}, True),
        ("json_schema", "```yaml\n[1]\n```", {"type": "array"}, False),
        ("json_schema", "Here: [1]", {"type": "array"}, False),
        ("json_schema", '{"a": 1, "xb": 2}', {"additionalProperties": False, "patternProperties": {"^x": {}}}, False),
        ("json_schema", '{"xa": 1}', {"additionalProperties": False, "patternProperties": {"^x": {}}}, True),
        ("json_schema", '{"xa": 1}', {"patternProperties": {"^x": {"type": "string"}}}, False),
        ("json_schema", '{"a": 1}', {"properties": {"a": {}}, "additionalProperties": {"type": "string"}}, True),
        ("json_schema", '{"b": 1}', {"properties": {"a": {}}, "additionalProperties": {"type": "string"}}, False),
        ("json_schema", '"abc"', {"pattern": "b"}, True),
        ("json_schema", '"abc"', {"pattern": "^b"}, False),
    ],
)
def test_right_and_wrong(name: str, answer: str, expected: object, right: bool) -> None:
    assert score(name, answer, expected) == float(right)
    assert needs_expected(name) == (expected is not None)


def test_every_scorer_is_listed() -> None:
    assert [name.partition(":")[0].partition("[")[0] for name in SCORERS] == list(MAKERS)


def test_scorers_that_compare_are_known_by_their_names() -> None:
    without = {"code", "language", "python"}
    assert {*COMPARING, *COMPARING_WITHOUT_ARGUMENT} == MAKERS.keys() - without
    assert not any(map(needs_expected, ("json_schema:a.json", "regex:a", "length:5", *without)))


def test_a_schema_may_be_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text(json.dumps({"type": "integer", "minimum": 3}))
    assert score("json_schema:schema.json", "4", base=tmp_path) == 1
    assert score("json_schema:schema.json", "2", base=tmp_path) == 0


def test_a_schema_loads_nothing_that_it_refers_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: pytest.fail("it was contacted"))
    with pytest.raises(UserError, match=r"has an unresolved .ref"):
        score("json_schema", "1", {"$ref": "http://127.0.0.1:1/schema.json"})


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"$schema": 5}, "its \\$schema is not a text"),
        ({"$ref": "#/type/0", "type": ["object"]}, "reference #/type/0 does not lead to a schema"),
        ({"unevaluatedProperties": False, "$ref": "#/nope"}, "unresolved \\$ref: /nope"),
        ({"unevaluatedProperties": False, "$dynamicRef": "#nope"}, "unresolved \\$ref"),
    ],
)
def test_a_schema_that_cannot_be_evaluated_is_an_error_of_its_row(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=rf"rows.jsonl:7: .*{message}"):
        score("json_schema", '{"a": 1}', schema)


@pytest.mark.slow
def test_rouge_is_the_librarys() -> None:
    from rouge_score.rouge_scorer import RougeScorer

    expected, answer = "the cat sat on the mat", "the cat lay on a mat today"
    theirs = RougeScorer(["rouge2", "rougeL"]).score(expected, answer)
    assert score("rouge", answer, expected) == theirs["rougeL"].fmeasure
    assert score("rouge:rouge2", answer, expected) == theirs["rouge2"].fmeasure
    # Longest common subsequence: the, cat, on, mat: precision 4/7, recall 4/6.
    assert score("rouge", answer, expected) == pytest.approx(2 * 4 / (7 + 6))


@pytest.mark.slow
def test_rouge_has_words_of_every_script() -> None:
    from rouge_score.tokenizers import DefaultTokenizer

    ascii_text = "The cat's 2nd snake_case mat, re-done at 3.5%!"
    assert UnicodeWords().tokenize(ascii_text) == DefaultTokenizer().tokenize(ascii_text)
    assert UnicodeWords().tokenize("GPT は日本, Привет हिन्दी") == ["gpt", "は", "日", "本", "привет", "हिन्दी"]
    assert score("rouge", "日本語です", "日本語です") == 1
    assert score("rouge", "東京都", "京都") == pytest.approx(0.8)


def test_chrf_is_the_librarys() -> None:
    import sacrebleu

    theirs = sacrebleu.sentence_chrf("a small cat", ["the small cat"]).score / 100
    assert score("chrf", "a small cat", ["a dog", "the small cat"]) == theirs
    assert score("chrf", "the small cat", "the small cat") == 1


def test_normalising_is_that_of_squad() -> None:
    assert normalised("The  quick, brown\tfox's an A.") == "quick brown foxs"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *[
            ("1 2 3", 3),
            ("-5", -5),
            ("1,000,000 people", 1_000_000),
            (".5", 0.5),
            ("2e3", 2000),
            ("x", None),
            ("3.", 3),
        ],
        *[("\u22125", -5), ("2e\u22123", 0.002), ("5-7", 7), ("10\u22125", 5), ("2024-01-05", 5)],
        *[("COVID-19", 19), ("1.5.2", 2), ("x = -5", -5), ("10 - 5", 5), ("(-5)", -5), ("+5", 5)],
    ],
)
def test_the_last_number(text: str, number: float | None) -> None:
    assert last_number(text) == number


def test_the_expected_answer_is_a_column_or_the_last_answer(tmp_path: Path) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": "2+2?"}], "completion": [{"role": "assistant", "content": "4"}]},
        {"prompt": "2+2?", "expected": ["4", "four"]},
        {"prompt": "2+2?", "expected": [{"role": "none of the roles"}]},
        {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]},
        {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "tool_calls": [{"name": "add"}]}]},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = read_answer_rows("rows.jsonl", tmp_path).rows
    assert [row.accepted for row in read] == [("4",), ("4", "four"), ('{"role": "none of the roles"}',), ("4",), ()]


def test_a_function_of_the_users(tmp_path: Path) -> None:
    (tmp_path / "my_metrics.py").write_text(
        "def long(answer, expected, row):\n    return len(answer) / row['most']\n"
        "def bad(answer, expected, row):\n    return 'good'\n"
        "def fails(answer, expected, row):\n    return row['missing']\n"
    )
    scorer = scorer_of("python:my_metrics:long", tmp_path)
    assert scorer.score("abc", row(most=4)).value == 0.75
    for name, message in (
        ("bad", "returned 'good'"),
        ("fails", "rows.jsonl:7: .* raised KeyError: 'missing' at my_metrics.py:6"),
    ):
        with pytest.raises(UserError, match=message):
            scorer_of(f"python:my_metrics:{name}", tmp_path).score("abc", row())


def test_a_function_that_ends_the_process_is_an_error_of_its_row(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text(
        "def one(answer, expected, row):\n    raise SystemExit(3)\n\ndef every(answers):\n    raise SystemExit(3)\n"
    )
    for name in ("one", "every"):
        with pytest.raises(UserError, match=r"rows.jsonl:7: .* raised SystemExit: 3"):
            scorer_of(f"python:ends:{name}", tmp_path).score("abc", row())


@pytest.mark.parametrize("name", ["one", "every"])
def test_a_signal_within_a_function_ends_the_command(name: str, tmp_path: Path) -> None:
    lines = "def one(answer, expected, row):\n    {0}\n\ndef every(answers):\n    {0}\n"
    raised = "import signal; signal.raise_signal(signal.SIGTERM)"
    (tmp_path / "interrupted.py").write_text(lines.format(raised))
    with pytest.raises(SignalExit) as ended, exit_at_signals():
        scorer_of(f"python:interrupted:{name}", tmp_path).score("abc", row())
    assert ended.value.code == 128 + signal.SIGTERM


def test_a_signal_within_the_import_of_a_module_ends_the_command(tmp_path: Path) -> None:
    (tmp_path / "interrupted_import.py").write_text("import signal\nsignal.raise_signal(signal.SIGTERM)\n")
    with pytest.raises(SignalExit), exit_at_signals():
        scorer_of("python:interrupted_import:one", tmp_path)


def test_a_function_with_other_parameters_and_a_module_that_fails_are_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "other_parameters.py").write_text("def f(foo):\n    return 1.0\n")
    (tmp_path / "fails_on_import.py").write_text("raise RuntimeError('not today')\n")
    with pytest.raises(
        UserError, match=r"has the parameters \(foo\).*; give it the parameters \(answer, expected, row\)"
    ):
        scorer_of("python:other_parameters:f", tmp_path)
    with pytest.raises(UserError, match="importing fails_on_import raised RuntimeError: not today"):
        scorer_of("python:fails_on_import:f", tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exakt", "did you mean exact?"),
        ("regex:((", "not a regular expression"),
        ("numeric:x", "must be a number"),
        ("python:mine", "is incomplete"),
        ("python:elsewhere:good", "there is no module 'elsewhere'"),
        ("python:..:good", "there is no module ''"),
        ("python:package.inner:good", ""),
        ("python:package.inner:goood", "inner.py has no 'goood'"),
        ("python:package.missing:good", "there is no module 'package.missing'"),
        ("python:mine.inner:good", "there is no module 'mine.inner'"),
        ("python:sets:anything", ""),
        ("json_schema:none.json", "none.json"),
        ("json_schema:broken.py", "broken.py"),
        ("json_schema", ""),
        ("rouge:rouge9", "take one of rouge1"),
        ("rouge", ""),
        ("code:0", "the time limit '0'"),
        ("code:5", ""),
        ("language:english", "unknown language code"),
        ("language:en", ""),
        ("chrf:2", "takes no argument"),
        ("judge:nobody", "not an address of a judge"),
        ("python:mine:goood", "mine.py has no 'goood'; did you mean good?"),
        ("python:broken:good", "broken.py cannot be read"),
        ("python:mine:good", ""),
        ("python:mine:Judge.score", ""),
        ("python:mine:sqrt", ""),
        ("python:open:anything", ""),
        ("python:json:loads", ""),
        ("python:sys:exit", ""),
        ("python:numpy.linalg:norm", ""),
        ("judge:http://nobody", ""),
        ("chrf", ""),
    ],
)
def test_a_scorer_is_looked_for_without_running_anything(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from math import sqrt\nopen('ran', 'w')\n"
        "def good(answer, expected, row):\n    return 1\nclass Judge:\n    pass\n"
    )
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "inner.py").write_text("open('ran', 'w')\ndef good(answer, expected, row):\n    return 1\n")
    (tmp_path / "broken.py").write_text("def good(:\n")
    (tmp_path / "open.py").write_text("from math import *\n")
    (tmp_path / "sets.py").write_text("globals()['anything'] = print\n")
    problem = scorer_problem(name, tmp_path)
    assert (str(problem) if problem else "") == "" if not message else message in str(problem)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exakt", "did you mean exact"),
        ("exact:1", "takes no argument"),
        ("regex:(", "not a regular expression"),
        ("regex:", "ends in a colon"),
        ("numeric:much", "must be a number, at least 0"),
        ("numeric:-1", "must be a number, at least 0"),
        ("numeric:nan", "must be a number, at least 0"),
        ("rouge:rouge9", "take one of rouge1"),
        ("code:0", "the time limit '0'"),
        ("code:601", "the time limit '601'"),
        ("code:\u00b2", "the time limit '\u00b2'"),
        (f"regex:{'(' * 3000}{')' * 3000}", "nested too deeply"),
        ("json_schema:none.json", "none.json"),
        ("python:nothing", "is incomplete"),
        ("python:no_such_module:f", "no module 'no_such_module'"),
        ("python:json:no_such", "has no 'no_such'"),
        ("judge:ftp://x", "not an address of a judge"),
    ],
)
def test_a_scorer_that_cannot_be_is_one_clear_error(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        scorer_of(name, tmp_path)


@pytest.mark.parametrize("name", ["python:os:system", "judge:http://127.0.0.1:1,m", "code", "json_schema:/etc/passwd"])
def test_a_row_cannot_run_code_contact_an_address_or_read_a_file(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rows\.jsonl:7"):
        scorers_of([row("x", (name,))], ["exact"], tmp_path)


def test_what_the_command_line_names_a_row_may_name(tmp_path: Path) -> None:
    (tmp_path / "my_scorer.py").write_text("def half(answer, expected, row):\n    return 0.5\n")
    name = "python:my_scorer:half"
    assert set(scorers_of([row("x", (name,))], [name], tmp_path)) == {name}


def test_a_pattern_that_takes_for_ever_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.scoring.patterns.PATTERN_SECONDS", 0.05)
    with pytest.raises(UserError, match=r"rows.jsonl:7: .* took more than"):
        score("regex", "a" * 60 + "b", r"^(a|aa)+$")


def test_a_pattern_without_enough_memory_is_a_users_error() -> None:
    def search(text: str, timeout: float) -> None:
        raise MemoryError

    with pytest.raises(UserError, match=r"'\(\?R\)' took too much memory"):  # half a GB, for this one
        is_found(SimpleNamespace(pattern="(?R)", search=search), "a")


@pytest.mark.parametrize(
    ("schema", "answer"),
    [
        ({"pattern": r"^(a|aa)+$"}, f'"{"a" * 60}b"'),
        ({"patternProperties": {r"^(a|aa)+$": False}}, f'{{"{"a" * 60}b": 1}}'),
        ({"additionalProperties": False, "patternProperties": {r"^(a|aa)+$": {}}}, f'{{"{"a" * 60}b": 1}}'),
    ],
)
def test_a_pattern_of_a_schema_that_takes_for_ever_is_ended(
    schema: object, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.scoring.patterns.PATTERN_SECONDS", 0.05)
    with pytest.raises(UserError, match=r"rows.jsonl:7: .* took more than"):
        score("json_schema", answer, schema)


@pytest.mark.parametrize(
    ("answer", "schema"),
    [
        ("NaN", {"type": "number"}),
        ("-Infinity", True),
        ("[" * 300 + "]" * 300, {"type": "array", "items": {"$ref": "#"}}),
        ("1e400", {"type": "integer", "multipleOf": 3}),
        ("1" * 400, {"multipleOf": 0.5}),
        ("[" * 100_000, True),
    ],
)
def test_what_cannot_be_checked_does_not_fit(answer: str, schema: object) -> None:
    assert score("json_schema", answer, schema) == 0


def test_fences_take_no_quadratic_time() -> None:
    began = time.monotonic()
    score("json_schema", "```" + "\n" * 100_000, True)
    assert program_of("```" + " " * 100_000, {"tests": "pass"})
    assert time.monotonic() - began < 2


PROBLEM = {
    "prompt": 'from typing import List\n\n\ndef total(of: List[int]) -> int:\n    """Adds them up."""\n',
    "test": "def check(candidate):\n    assert candidate([1, 2]) == 3\n    assert candidate([]) == 0\n",
    "entry_point": "total",
}
LISTED = {"test_list": ["assert double(2) == 4", "assert double(0) == 0"]}


@pytest.mark.skipif(bool(sandbox_problem()), reason="no sandbox on this system")
@pytest.mark.parametrize(
    ("answer", "fields", "why"),
    [
        ("    return sum(of)\n", PROBLEM, "passed"),
        ("    return len(of)\n", PROBLEM, "AssertionError"),
        ("Here it is:\n```python\ndef total(of: List[int]) -> int:\n    return sum(of)\n```\nDone.", PROBLEM, "passed"),
        ("```\ndef totals(of):\n    return sum(of)\n```", PROBLEM, "AssertionError"),  # the prompt's gives None
        ("def double(x):\n    return 2 * x", LISTED, "passed"),
        ("def double(x):\n    return x * x", LISTED | {"test_list": ["assert double(2) == 5"]}, "AssertionError"),
        ("def double(x):\n    while True: pass", LISTED, "time"),
        ("def double(x):\n    return open('made', 'w').write('')", LISTED, "PermissionError"),
        ("def f(:", LISTED, "SyntaxError"),
        ("", LISTED, "empty"),
    ],
)
def test_programs_are_run_with_the_rows_tests(answer: str, fields: dict[str, object], why: str) -> None:
    found = scorer_of("code:2", Path()).score(answer, row(None, **fields))
    assert (found.value, found.why) == (float(why == "passed"), why)


@pytest.mark.parametrize("start", ["def", "async def"])
def test_an_answer_that_defines_the_function_begins_a_line_after_the_prompt(start: str) -> None:
    answer, prompt = f"{start} total(of): ...", PROBLEM["prompt"].rstrip()
    assert program_of(answer, PROBLEM | {"prompt": prompt}).startswith(f"{prompt}\n{answer}\n")


@pytest.mark.skipif(bool(sandbox_problem()), reason="no sandbox on this system")
@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("code", {}, "rows.jsonl:7: the scorer code runs unit tests, and this row has none"),
        ("code", {"tests": 5}, "neither Python nor a list"),
        ("code", {**PROBLEM, "entry_point": "a b"}, "not a name of a function"),
        ("code:0", {}, "write a whole number of seconds"),
    ],
)
def test_what_is_wrong_with_unit_tests(name: str, fields: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        scorer_of(name, Path()).score("x = 1", row(None, **fields))


def test_the_share_of_a_language() -> None:
    english, german = "The sea is blue and very cold today.", "Das Meer ist heute blau und sehr kalt."
    assert score("language:en", english) == score("language:de", german) == 1
    assert score("language:de", english) == score("language:en", "12 + 5 = 17") == score("language:en", "") == 0
    letters = [sum(map(str.isalpha, text)) for text in (english, german)]
    assert score("language:de", f"{english} {german}") == pytest.approx(letters[1] / sum(letters))
    with pytest.raises(UserError, match=r"has an unknown language code; (take one of|did you mean)"):
        scorer_of("language:english", Path())
    with pytest.raises(UserError, match="has an unknown language code"):
        scorer_of("language", Path())


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "py3langid", None)
    with pytest.raises(UserError, match=r"language:en needs the package py3langid; pip install 'stoker\[evaluate\]'"):
        scorer_of("language:en", Path())


def test_a_function_may_ask_for_all_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "together.py").write_text(
        "def rank(answers, rows):\n    return [sorted(answers).index(a) + r['more'] for a, r in zip(answers, rows)]\n"
        "def few(answers):\n    return [1.0]\n"
        "def nothing(answers):\n    pass\n"
        "def fails(answers, **more):\n    raise KeyError(sorted(more))\n"
        "def infinite(answers):\n    return [0.0, float('inf')]\n"
        "def huge(answers):\n    return [0.0, -1e300]\n"
        "def one(answers):\n    return 1.5\n"
        "def named(answers):\n    return dict.fromkeys(answers, 1.0)\n"
        "def either(answers):\n    return {1.0, 2.0}\n"
        "def scalar(answers):\n    import numpy\n    return numpy.array(1.5)\n"
        "def array(answers):\n    import numpy\n    return numpy.array([1.0, 2.0])\n"
        "def pair(answers):\n    return 1.0, 2.0\n"
        "async def later(answers):\n    return [1.0, 2.0]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    rows = [row(more=10), AnswerRow("rows.jsonl", 8, (), None, (), {"more": 20})]

    def together(name: str) -> list[float]:
        scorer = scorer_of(f"python:together:{name}", tmp_path)
        assert scorer.batch is not None
        return [found.value for found in scorer.batch(["b", "a"], rows)]

    assert together("rank") == [11, 20]
    assert scorer_of("python:together:rank", tmp_path).score("b", rows[1]).value == 20
    with pytest.raises(
        UserError, match=r"rows.jsonl:7: python:together:few, called with 2 answers.*returned 1 numbers"
    ):
        together("few")
    with pytest.raises(UserError, match=r"raised KeyError: .*'expected', 'rows'"):
        together("fails")
    with pytest.raises(UserError, match=r"returned None; give a list"):
        together("nothing")
    with pytest.raises(UserError, match=r"rows\.jsonl:8: python:together:infinite returned inf"):
        together("infinite")
    with pytest.raises(UserError, match=r"rows\.jsonl:8: python:together:huge returned -1e\+300; .* at most 3.4e38"):
        together("huge")
    for name, shown in (("one", "1.5"), ("named", "{'a': 1.0"), ("either", "{1.0"), ("scalar", r"array\(1.5\)")):
        with pytest.raises(UserError, match=f"the first to this row, returned {shown}.*; give a list of one number"):
            together(name)
    assert together("array") == together("pair") == [1, 2]
    with pytest.raises(UserError, match="later is an async function; write it with `def` alone"):
        together("later")


def test_a_function_of_trl_is_called_as_trl_calls_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "as_trl.py").write_text(
        "def right(completions, answer, **more):\n"
        "    texts = [c if isinstance(c, str) else c[0]['content'] for c in completions]\n"
        "    assert sorted(more) == ['prompts', 'trainer_state']\n"
        "    return [float(text == a) for text, a in zip(texts, answer)]\n"
        "def first(prompts, completions):\n    return [float(c == p) for c, p in zip(completions, prompts)]\n"
        "def even(completion_ids):\n    return [None if len(ids) % 2 else len(ids) for ids in completion_ids]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    chat = [{"role": "user", "content": "Say b."}]
    rows = [row(prompt="Say a.", answer="a"), row(prompt=chat, answer="b"), row(prompt="x", answer="c")]
    batch = scorer_of("python:as_trl:right", tmp_path).batch
    assert batch is not None and [s.value for s in batch(["a", "b", "d"], rows)] == [1, 1, 0]
    batch = scorer_of("python:as_trl:first", tmp_path).batch
    assert batch is not None and [s.value for s in batch(["a", "b", "x"], rows)] == [0, 0, 1]
    batch = scorer_of("python:as_trl:even", tmp_path).batch
    assert batch is not None and [s.value for s in batch(["a", "b"], rows[:2], [(5, 7), (5,)])] == [2, 0]
    with pytest.raises(UserError, match="missing 1 required positional argument: 'completion_ids'"):
        batch(["a"], rows[:1])


@pytest.mark.parametrize("value", ["np.float32(0.5)", "np.array(0.5)", "torch.tensor([0.5])"])
def test_a_number_of_any_kind_is_a_score(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    code = f"import numpy as np\nimport torch\nhalf = lambda answer, expected, row: {value}\n"
    (tmp_path / "numbers_of.py").write_text(code + "text = lambda *_: '0.5'\nlarge = lambda *_: 3.5e38\n")
    monkeypatch.delitem(sys.modules, "numbers_of", raising=False)
    assert score("python:numbers_of:half", "a", base=tmp_path) == 0.5
    for name in ("text", "large"):
        with pytest.raises(UserError, match="a function must return a finite number"):
            score(f"python:numbers_of:{name}", "a", base=tmp_path)


@pytest.mark.parametrize("levels", [200, 3_000, 100_000])
def test_a_schema_that_is_nested_too_deeply_is_an_error_of_its_row(levels: int) -> None:
    with pytest.raises(UserError, match="nested too deeply"):
        score("json_schema", "1", '{"not":' * levels + "{}" + "}" * levels)


def test_references_that_multiply_without_end_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_schema, "MOST_REFERENCES", 1000)
    both = {f"a{n}": {"anyOf": [{"$ref": f"#/$defs/a{n + 1}"}] * 2} for n in range(40)}
    schema = {"$defs": {**both, "a40": {"const": 2}}, "$ref": "#/$defs/a0"}
    found = scorer_of("json_schema", Path()).score("1", row(schema))
    assert found.value == 0 and "more than 1,000 references for one answer" in found.why
    long = {"$defs": {"a": {"type": "integer"}}, "items": {"$ref": "#/$defs/a"}}
    assert score("json_schema", str([1] * 1000), long) == 1 and score("json_schema", str([1] * 1001), long) == 0
    list_of = {"$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"}
    assert (
        score("json_schema", '{"n": {"n": {}}}', list_of) == 1 and score("json_schema", '{"n": {"n": 1}}', list_of) == 0
    )


@pytest.mark.parametrize(
    ("rewards", "expected", "reason"),
    [
        (("numeric",), "none", "the expected answer 'none' contains no number"),
        (("exact", "numeric:1%"), ["1", "many"], "the expected answer 'many' contains no number"),
        (("numeric",), "1" * 400, f"the expected answer {'1' * 40!r} is beyond float64"),
        (("regex",), "(", "'(' is not a regular expression: missing ) at position 1"),
        (("json_schema",), "{", "the expected value is not valid JSON"),
        (("json_schema",), 1, "a JSON schema is an object"),
        (("exact", "numeric", "regex", "chrf", "length:5"), "1", ""),
        (("json_schema",), {"type": "object"}, ""),
    ],
)
def test_expected_answers_are_checked_before_there_are_answers(
    rewards: tuple[str, ...], expected: Any, reason: str
) -> None:
    check = pickle.loads(pickle.dumps(expected_check(rewards)))
    assert check(expected).startswith(reason) and bool(check(expected)) == bool(reason)


def test_nothing_is_expected_where_no_reward_compares() -> None:
    assert expected_check(("regex:a", "python:m:f")) is None
