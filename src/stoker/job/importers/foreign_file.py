"""Reads a foreign file: YAML, JSON, or a command line with ``--key value``, with the position of every value."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from stoker.errors import Problem, UserError
from stoker.job.document.text_file import read_text
from stoker.job.document.yaml_document import JobDocument, Mark, kind_of, parse_document, parse_value
from stoker.job.keys.key_paths import KeyPath

SUBCOMMAND = "(subcommand)"  # the key of the word before the first option: sft of `trl sft --...`
_TOKEN = re.compile(r"#[^\n]*|\\\n|(?:[^\s\"'\\]|\\.|\"(?:\\.|[^\"\\])*\"|'[^']*')+", re.DOTALL)
_OPTION = re.compile(r"--?([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)

_GIVEN: ContextVar[frozenset[Path] | None] = ContextVar("given", default=None)  # see `only_given`


def read_source(path: str | Path) -> JobDocument:
    """Reads a file's keys and values. Raises UserError with the position of a syntax error."""
    if not Path(path).exists():
        raise UserError(Problem("there is no such file", file=str(path)))
    text = read_text(path)
    is_other = Path(path).suffix.lower() in (".yaml", ".yml", ".json")
    if not is_other and re.search(r"(^|\s)--[A-Za-z][\w-]*", text):
        return _command_line(text, str(path))
    if text.lstrip().startswith("{"):  # JSON is YAML but for tabs, which YAML does not indent with
        text = re.sub(r"^\t+", lambda tabs: " " * len(tabs[0]), text, flags=re.MULTILINE)
    document = parse_document(text, str(path))
    if not isinstance(document.data, dict) or not document.data:
        what = kind_of(document.data) if document.data else "nothing"
        raise UserError(Problem(f"the file contains {what}, not keys and values", file=str(path), line=1, column=1))
    return document


@contextmanager
def only_given(paths: Sequence[str | Path]) -> Iterator[None]:
    """A context in which only the given files are found by other files' references."""
    token = _GIVEN.set(frozenset(Path(path).resolve() for path in paths))
    try:
        yield
    finally:
        _GIVEN.reset(token)


def is_there(path: Path) -> bool:
    """Returns whether a readable file exists; within `only_given`, whether it is one of those."""
    given = _GIVEN.get()
    return (given is None or path.resolve() in given) and path.is_file()


def find_beside(name: str, document: JobDocument) -> Path | None:
    """Returns a file that another one names: from where we are, from that file's folder, or from one above it."""
    here = Path(document.file).resolve().parent
    for folder in (Path.cwd(), here, *here.parents):
        if is_there(folder / name):
            return from_here(folder / name)
    return None


def from_here(path: Path) -> Path:
    """Returns a path relative to the current folder if it is below it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _command_line(text: str, file: str) -> JobDocument:
    """``trl sft --learning_rate 2e-5 --packing``: options as keys; several values make a list, none means true."""
    data: dict[str, Any] = {}
    marks: dict[KeyPath, Mark] = {}
    key = ""
    before = ""
    for found in _TOKEN.finditer(text):
        if found[0].startswith(("#", "\\\n")):
            continue
        quoted = found[0].startswith(("'", '"'))
        word = " ".join(shlex.split(found[0]))
        line, column = _place(text, found.start())
        option = _OPTION.fullmatch(word) if word.startswith("--") and not quoted else None
        if option is None and key:
            _add(data, key, word if quoted else _read(word))
            marks[(key,)] = Mark(
                file, marks[(key,)].key, marks[(key,)].value if isinstance(data[key], list) else (line, column)
            )
        elif option is None:
            before = word
        else:
            if not data and re.fullmatch(r"[a-z]{2,9}", before):
                data[SUBCOMMAND], marks[(SUBCOMMAND,)] = before, Mark(file, (line, 1), (line, 1))
            key = option[1].replace("-", "_")
            if key in data:
                where = Problem(f"`--{option[1]}` is given twice", "keep one", file=file, line=line, column=column)
                raise UserError(where)
            data[key] = True if option[2] is None else _read(option[2])
            marks[(key,)] = Mark(file, (line, column), (line, column))
            key = "" if option[2] is not None else key
    if not data:
        raise UserError(Problem("the file holds no `--key value`", file=file, line=1, column=1))
    return JobDocument(file, data, marks)


def _add(data: dict[str, Any], key: str, value: Any) -> None:
    held = data[key]
    data[key] = value if held is True else [*held, value] if isinstance(held, list) else [held, value]


def _read(word: str) -> Any:
    try:
        value = parse_value(word)
    except UserError:
        return word
    return word if value is None or (isinstance(value, dict | list) and not word.startswith(("{", "["))) else value


def _place(text: str, at: int) -> tuple[int, int]:
    return text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)
