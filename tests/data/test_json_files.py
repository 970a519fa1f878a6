"""Rows of JSON lines and of JSON files: broken ones are refused with their place, arrays and objects are told apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from row_outcomes import outcome

from stoker.data.files import byte_streams, readers
from stoker.errors import UserError

BROKEN_LINES: list[tuple[bytes, str | dict[str, object] | None]] = [
    (b'{"a": "first"}', {"a": "first"}),
    (b"", None),
    (b'{"a": "b\xff"}', "not valid UTF-8: 0xff at byte 9"),
    (b'{"a": "cut sho', "not valid JSON: Unterminated string starting at column 7"),
    (b'{"a" "b"}', "not valid JSON: Expecting ':' delimiter at column 6"),
    (b"[1, 2]", "not an object: a list"),
    (b'"text"', "not an object: a string"),
    (b"null", "not an object: null"),
    (b"7", "not an object: a number"),
    (b'{"a": "windows"}\r', {"a": "windows"}),
    (b"  \t", None),
    (b"\0\0\0\0", "only NUL bytes"),
    (b'{"a": "\0"}', "not valid JSON: Invalid control character at column 8"),
    (b'{"a": "\\ud83d\\ude00"}', {"a": "😀"}),
    (b'{"a": "\\ud83d"}', "half a surrogate pair in a string"),
    (b"[" * 100_000, "nested too deeply"),
    (b'{"a": "' + b"x" * 3_000_000 + b'"}', {"a": "x" * 3_000_000}),
    (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON: an integer of more than 4,300 digits"),
    (b'{"a": [{"b": 1, "c": 2, "b": 1}]}', "repeated key: b"),
    (b'{"a": "last"}', {"a": "last"}),
]


def test_broken_json_lines_are_refused_in_their_place(tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"\n".join(line for line, _ in BROKEN_LINES))
    expected = [(number, want) for number, (_, want) in enumerate(BROKEN_LINES, 1) if want is not None]
    found = outcome(path)
    assert [row for row, _ in found] == [row for row, _ in expected]
    for (row, got), (_, want) in zip(found, expected, strict=True):
        if isinstance(want, str):
            assert isinstance(got, str) and got.startswith(want), f"row {row}: {got}"
        else:
            assert got == want, f"row {row}"


def test_a_row_of_nan_is_left_to_the_format(tmp_path: Path) -> None:
    path = tmp_path / "nan.jsonl"
    path.write_bytes(b'{"a": NaN}\n')
    [(_, value)] = outcome(path)
    assert isinstance(value, dict) and value["a"] != value["a"]


def test_a_line_over_the_limit_is_refused_and_the_next_one_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (readers, byte_streams):
        monkeypatch.setattr(module, "LONGEST_LINE", 1000)
    path = tmp_path / "long.jsonl"
    fits = b'{"a": "' + b"x" * 990 + b'"}'
    path.write_bytes(fits[:-3] + b'"}\n{"a": "' + b"y" * 3_000_000 + b'"}\n{"a": 1}\n')
    assert outcome(path)[1:] == [(2, "longer than 64 MiB"), (3, {"a": 1})]
    assert outcome(path)[0][0] == 1 and isinstance(outcome(path)[0][1], dict)


@pytest.mark.parametrize(
    ("text", "line", "column"),
    [
        ('[\n {"a": 1},\n {"a" 2}\n]', 3, 7),
        ('[{"a": 1},', 1, 11),
        ('[{"a": 1}] x', 1, 12),
        ('{\n"a": }', 2, 6),
        ('[{"a": 1},\n {"a": 2},\n]', 2, 10),
    ],
)
def test_a_broken_json_file_is_an_error_with_its_place(tmp_path: Path, text: str, line: int, column: int) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        outcome(path)
    [problem] = caught.value.problems
    assert (problem.file, problem.line, problem.column) == (str(path), line, column)
    assert problem.message.startswith("not valid JSON")


def test_a_json_array_refuses_single_items(tmp_path: Path) -> None:
    path = tmp_path / "mixed.json"
    path.write_text('[{"a": 1}, 2, "three", {"a": "\\udc00"}, {"a": 5}, {"a": 6, "a": 7}, {"a": 8}]')
    assert outcome(path) == [
        (1, {"a": 1}),
        (2, "not an object: a number"),
        (3, "not an object: a string"),
        (4, "half a surrogate pair in a string"),
        (5, {"a": 5}),
        (6, "repeated key: a"),
        (7, {"a": 8}),
    ]


def test_json_lines_whose_first_line_is_broken_are_still_lines(tmp_path: Path) -> None:
    path = tmp_path / "lines.json"
    path.write_text('{"a": \n{"a": 2}\n')
    assert [row for row, _ in outcome(path)] == [1, 2] and outcome(path)[1] == (2, {"a": 2})


@pytest.mark.parametrize("start", ['{"data": [\n', '{"version": 1, "data": [', '\n{"data": [ \n\n'])
def test_an_object_around_one_row_a_line_is_read_whole(tmp_path: Path, start: str) -> None:
    path = tmp_path / "around.json"
    path.write_text(start + '{"a": 1},\n{"a": 2},\n{"a": 3}\n]}\n')
    assert outcome(path) == [(1, {"a": 1}), (2, {"a": 2}), (3, {"a": 3})]


def test_an_object_around_rows_refuses_single_rows(tmp_path: Path) -> None:
    path = tmp_path / "around.json"
    path.write_text(
        '{"version": {"n": 1}, "data": [\n{"a": 1},\n{"a": [{"b": 2, "b": 3}]},\n{"c": 1, "c": 2},\n{"a": 4}\n]}'
    )
    assert outcome(path) == [(1, {"a": 1}), (2, "repeated key: b"), (3, "repeated key: c"), (4, {"a": 4})]
    path.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b", "role": "c"}]}')
    assert outcome(path) == [(1, "repeated key: role")]
    path.write_text('{"data": [{"a": 1}], "data": [{"a": 2}]}')
    with pytest.raises(UserError, match="repeated key: data"):
        outcome(path)


def test_an_object_alone_is_one_row(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    path.write_text(json.dumps({"text": "x", "tags": ["a", "b"]}, indent=1))
    assert outcome(path) == [(1, {"text": "x", "tags": ["a", "b"]})]


@pytest.mark.parametrize(
    "turns",
    [
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}],
        [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": []}],
        [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}],
    ],
)
def test_a_conversation_alone_is_one_row(tmp_path: Path, turns: list[dict[str, object]]) -> None:
    path = tmp_path / "one.json"
    path.write_text(json.dumps({"messages": turns}, indent=1))
    assert outcome(path) == [(1, {"messages": turns})]
    jobs = [{"role": "engineer", "text": "x"}, {"role": "writer", "text": "y"}]
    path.write_text(json.dumps({"data": jobs}, indent=1))
    assert outcome(path) == [(1, jobs[0]), (2, jobs[1])]
