"""YAML 1.2 as plain data with places: compared with what the file's text says at those places."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.errors import UserError
from stoker.job.document.text_file import LARGEST_FILE
from stoker.job.document.yaml_document import MOST_VALUES, parse_document, parse_value, read_document


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("5E3", 5000.0),
        (".5", 0.5),
        ("010", 10),
        ("on", "on"),
        ("off", "off"),
        ("yes", "yes"),
        ("no", "no"),
        ("true", True),
        ("~", None),
        ("", None),
        ("2024-01-01", "2024-01-01"),
        ("'1'", "1"),
        ("[a, 1, {b: 2.5}]", ["a", 1, {"b": 2.5}]),
        ("12:30:45", "12:30:45"),
    ],
)
def test_scalars_are_read_as_yaml_1_2(text: str, value: object) -> None:
    read = parse_value(text)
    assert read == value
    assert type(read) is type(value)


def test_marks_point_at_the_text_of_keys_and_values() -> None:
    text = "task: sft\ntrain:\n  lr: 1e-4\n  batch:   8 # eight\n"
    text += "data:\n  - path: a.jsonl\n  - b.jsonl\nmix: {temperature: 2}\n"
    document = parse_document(text, "job.yaml")
    lines = text.splitlines()
    written = {
        ("task",): ("task", "sft"),
        ("train", "lr"): ("lr", "1e-4"),
        ("train", "batch"): ("batch", "8"),
        ("data", 0, "path"): ("path", "a.jsonl"),
        ("data", 1): ("b.jsonl", "b.jsonl"),
        ("mix", "temperature"): ("temperature", "2"),
    }
    for path, (key, value) in written.items():
        mark = document.marks[path]
        assert lines[mark.key[0] - 1][mark.key[1] - 1 :].startswith(key)
        assert lines[mark.value[0] - 1][mark.value[1] - 1 :].startswith(value)


def test_an_alias_gives_the_value_and_the_place_of_its_own_key() -> None:
    document = parse_document("a: &x {lr: 1}\nb: *x\nc:\n  <<: *x\n  eps: 2\n", "job.yaml")
    assert document.data == {"a": {"lr": 1}, "b": {"lr": 1}, "c": {"lr": 1, "eps": 2}}
    assert document.marks[("b",)].value == (2, 1)


@pytest.mark.parametrize(
    ("text", "place", "part"),
    [
        ("a: 1\nb: 2\na: 3\n", (3, 1), "given twice (also line 1)"),
        ("t:\n  a: 1\n  a: 2\n", (3, 3), "given twice (also line 2)"),
        ("a:\tb\n\tc: 1\n", (1, 3), "tab"),
        ("a: b: c\n", (1, 5), "second `key:`"),
        ("a: [1, 2\n", (2, 1), "not closed"),
        ('{"a": 1}\n{"a": 2}\n', (2, 1), "this looks like a data file"),
        ("a: 1\n---\nb: 2\n", (2, 1), "second document"),
        ("a: &x [*x]\n", (1, 4), "refers to a value that contains it"),
        ("a: *nothing\n", (1, 4), "undefined alias"),
        ("a: !secret 3\n", (1, 4), "tag"),
        ("? [a]\n: 1\n", (1, 3), "single word"),
        ("a: 1\nb: x\x01y\n", (2, 5), "U+0001"),
        ("a: " + "[" * 20_000, (1, 1), "nested"),
    ],
)
def test_syntax_errors_have_their_place(text: str, place: tuple[int, int], part: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_document(text, "job.yaml")
    (problem,) = caught.value.problems
    assert (problem.file, problem.line, problem.column) == ("job.yaml", *place)
    assert part in problem.message


def test_two_duplicate_keys_are_both_reported() -> None:
    with pytest.raises(UserError) as caught:
        parse_document("a: 1\na: 2\nb: 1\nb: 2\n", "job.yaml")
    assert [problem.line for problem in caught.value.problems] == [2, 4]


@pytest.mark.parametrize(
    ("content", "place", "part"),
    [
        (b"", (1, 1), "empty"),
        (b"# nothing but a comment\n", (1, 1), "empty"),
        (b"- a\n- b\n", (1, 1), "a list"),
        (b"just words\n", (1, 1), "a single value"),
        (b"a: 1\nb: caf\xe9\n", (2, 7), "0xe9 is not UTF-8"),
        (b"a" * (LARGEST_FILE + 1), (0, 0), "bytes"),
    ],
)
def test_files_that_hold_no_job(tmp_path: Path, content: bytes, place: tuple[int, int], part: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_document(path)
    (problem,) = caught.value.problems
    assert (problem.file, problem.line, problem.column) == (str(path), *place)
    assert part in problem.message


def test_a_missing_file_and_a_folder_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        read_document(tmp_path / "none.yaml")
    with pytest.raises(UserError, match="folder"):
        read_document(tmp_path)
    (tmp_path / "chain.yaml").write_text("task: sft\n")
    with pytest.raises(UserError, match=r"did you mean chain\.yaml\?"):
        read_document(tmp_path / "chain.yam")


def test_a_byte_order_mark_and_windows_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(b"\xef\xbb\xbftask: sft\r\nsteps: 3\r\n")
    document = read_document(path)
    assert document.data == {"task": "sft", "steps": 3}
    assert document.marks[("steps",)].value == (2, 8)


def test_ten_megabytes_and_nested_aliases_are_refused_before_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(b"- x\n" * 2_500_000)
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
    bomb += "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10))
    with pytest.raises(UserError, match="bytes"):
        read_document(path)
    with pytest.raises(UserError, match="more than 50,000 values; write fewer, where an alias counts"):
        parse_document(bomb, "job.yaml")


@pytest.mark.parametrize("text", [r'"\ud800": 1', r'a: "\ud800"', r'a: "x\0"', r'"\0": 1'])
def test_text_that_no_path_can_hold_is_refused_at_its_place(text: str) -> None:
    with pytest.raises(UserError, match=r"job.yaml:1:\d: the (key|text) contains U\+(D800|0000)"):
        parse_document(text, "job.yaml")


@pytest.mark.parametrize("number", ["1" * 5000, "0x" + "f" * 5000, "9223372036854775808", "-9223372036854775809"])
def test_numbers_beyond_64_bits_are_refused(number: str) -> None:
    with pytest.raises(UserError, match=r"job.yaml:1:4: .* cannot be read as a whole number of 64 bits"):
        parse_document(f"a: {number}", "job.yaml")


def test_a_directive_cannot_change_what_values_mean() -> None:
    with pytest.raises(UserError, match=r"job.yaml:2:1: YAML 1.1 reads other values"):
        parse_document("# a job\n%YAML 1.1\n---\nsteps: 010\n", "job.yaml")
    assert parse_document("%YAML 1.2\n---\nsteps: 010\n", "job.yaml").data == {"steps": 10}


@pytest.mark.parametrize("name", ["one.jsonl", "rows.csv", "rows.v2.parquet", "rows.JSONL.gz"])
def test_a_data_file_is_named_as_such_whatever_it_holds(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b'{"prompt": "a"}\n\xac')
    with pytest.raises(
        UserError, match="this is a data file, not a job or a configuration; give a data file as `data:`"
    ):
        read_document(tmp_path / name)
    (tmp_path / "job.csv.yaml").write_text("task: sft\n")
    assert read_document(tmp_path / "job.csv.yaml").data == {"task": "sft"}


def test_a_device_without_end_is_no_job_file() -> None:
    with pytest.raises(UserError, match="a job file has at most"):
        read_document("/dev/zero")


def test_a_long_text_is_not_parsed_to_its_end() -> None:
    with pytest.raises(UserError, match="more than 50,000 values"):
        parse_document("a: [" + "1, " * MOST_VALUES + "}", file="job.yaml")


@pytest.mark.parametrize(
    "lines",
    [
        [f"a{n}: &A{n} {'[' * 60}{f'*A{n - 1}' if n else 1}{']' * 60}" for n in range(6)],
        [f"a{n}: &A{n} {{{f'<<: *A{n - 1}, ' if n else ''}k{n}: 1}}" for n in range(150)],
        ["a: " + "[" * 150 + "]" * 150],
    ],
)
def test_values_that_aliases_nest_too_deeply_are_refused(lines: list[str]) -> None:
    with pytest.raises(UserError, match="nested too deeply"):
        parse_document("\n".join(lines) + "\n", file="job.yaml")
