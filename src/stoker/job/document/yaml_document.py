"""A YAML file as plain data, with the line and column of every key and value."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from stoker.errors import Problem, UserError
from stoker.job.document.text_file import read_text
from stoker.job.keys.key_paths import KeyPath, dotted

MOST_VALUES = 50_000  # after aliases are written out, so that a few nested aliases cannot grow without end
MOST_DEPTH = 100  # blocks and lists within each other, with the aliases written out
COMMAND_LINE = "command line"

# Characters that YAML's escapes can write, but that neither a path nor a tokenizer accepts.
_UNFIT = re.compile("[\0\ud800-\udfff]")
_DIRECTIVE = re.compile(r"(?:[ \t]*(?:#.*)?\r?\n|%(?!YAML\b).*\n)*%YAML[ \t]+([^\s#]+)")

TAG = "tag:yaml.org,2002:"
MERGE = TAG + "merge"
TYPED = {TAG + name for name in ("null", "bool", "int", "float")}
# Tags that YAML resolves implicitly and a job reads as text: it has no dates.
TEXT = {TAG + name for name in ("str", "timestamp", "value", "merge")}


@dataclass(frozen=True)
class Mark:
    """The positions of a key and its value, each as (line, column) counted from 1; (0, 0) on the command line."""

    file: str
    key: tuple[int, int]
    value: tuple[int, int]
    override: str = ""


@dataclass(frozen=True)
class JobDocument:
    """Plain data (dict, list, str, int, float, bool, None) and the marks of every path in it.

    Attributes:
        planned: whether `parallel: auto` was written: the layout is the planner's to choose, but for what else is
            written of it.
        nodes: that the job runs on, where that is known, each with equally many processes; 1 if they differ.
        continues: whether the job begins with trained weights of the model that it names, those of an earlier stage.
    """

    file: str
    data: Any
    marks: dict[KeyPath, Mark]
    planned: bool = False
    nodes: int | None = None
    continues: bool = False

    def at(self, path: KeyPath) -> Any:
        """Returns the value at a path. Raises KeyError where none was written."""
        value = self.data
        for part in path:
            inside = part in value if isinstance(value, dict) else isinstance(value, list) and part in range(len(value))
            if not inside:
                raise KeyError(dotted(path))
            value = value[part]
        return value

    def problem(self, path: KeyPath, message: str, suggestion: str = "", *, at_key: bool = False) -> Problem:
        """Returns a problem at a path's value, or at its key; else at the nearest enclosing key, else at the file."""
        key = dotted(path)
        for end in range(len(path), 0, -1):
            mark = self.marks.get(path[:end])
            if mark is None:
                continue
            if mark.override:
                return Problem(f"in `{mark.override}`: {message}", suggestion, key=key, file=COMMAND_LINE)
            # The value of a block begins at its first key, which the message does not concern.
            whole = isinstance(self.at(path[:end]), dict | list)
            line, column = mark.key if at_key or whole or end < len(path) else mark.value
            return Problem(message, suggestion, key=key, file=mark.file, line=line, column=column)
        return Problem(message, suggestion, key=key, file=self.file, line=1, column=1)

    def where(self, path: KeyPath) -> str:
        """Returns a value's place as text: ``job.yaml:3:5``, or the override's text; empty if none was written."""
        mark = self.marks.get(path)
        if mark is None:
            return ""
        return mark.override or ":".join(map(str, (mark.file, *mark.value)))


def read_document(path: str | Path) -> JobDocument:
    """Read a file whose top level is a mapping. Raises UserError with every problem's place."""
    return parse_mapping(read_text(path), file=str(path))


def parse_mapping(text: str, file: str) -> JobDocument:
    """Parses a text whose top level is a mapping. Raises UserError with every problem's place."""
    document = parse_document(text, file=file)
    if document.data is None:
        raise UserError(Problem("the file is empty", "write one with `stoker new`", file=file, line=1, column=1))
    if not isinstance(document.data, dict):
        message = f"the file contains {kind_of(document.data)}, not keys and values"
        raise UserError(Problem(message, "start with a line such as `task: sft`", file=file, line=1, column=1))
    return document


def parse_document(text: str, file: str) -> JobDocument:
    """Parse YAML 1.2. Raises UserError for syntax errors, duplicate keys, self-reference and unknown tags."""
    document, problems = parse_with_problems(text, file)
    if problems:
        raise UserError(*problems)
    return document


def parse_with_problems(text: str, file: str) -> tuple[JobDocument, list[Problem]]:
    """Returns a document without its unreadable values, and their problems.

    Raises:
        UserError: the text is not YAML, or is nested too deeply, or has too many values.
    """
    version = _DIRECTIVE.match(text)
    if version is not None and version[1] != "1.2":
        line = text.count("\n", 0, version.start(1)) + 1
        message = f"YAML {version[1]} reads other values than 1.2, the version of job files"
        raise UserError(Problem(message, "remove the line `%YAML`", file=file, line=line, column=1))
    yaml = YAML(typ="safe", pure=True)
    yaml.Composer = _BoundedComposer
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a re-used anchor is legal YAML 1.2
            root = yaml.compose(text)
    except MarkedYAMLError as error:
        raise UserError(_syntax_problem(error, file)) from error
    except ReaderError as error:
        before = text[: error.position]
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        message = f"character U+{ord(text[error.position]):04X} is not allowed in YAML"
        raise UserError(Problem(message, "remove it", file=file, line=line, column=column)) from error
    except RecursionError as error:
        raise UserError(_too_deep(file)) from error
    except _TooManyValues as error:
        raise UserError(_too_many(file)) from error
    builder = _Builder(yaml, file)
    data = builder.build(root, ()) if root is not None else None
    return JobDocument(file, data, builder.marks), builder.problems


def forbidden_character(text: str) -> str:
    """Returns the first forbidden character of a text, as ``U+0000``; empty if there is none."""
    found = _UNFIT.search(text)
    return f"U+{ord(found[0]):04X}" if found else ""


def parse_value(text: str) -> Any:
    """Returns the value after ``key=`` on the command line, as a YAML scalar or flow. Raises UserError."""
    return parse_document(text, file=COMMAND_LINE).data


def kind_of(value: Any) -> str:
    """Returns the kind of a YAML value, for messages."""
    if isinstance(value, dict):
        return "a block"
    if isinstance(value, list):
        return "a list"
    return "nothing" if value is None else "a single value"


class _TooManyValues(Exception):
    pass


class _BoundedComposer(Composer):
    """Stops at `MOST_VALUES` values, with aliases as single ones: a long text would be parsed for a minute."""

    count = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.count += parent is None or index is not None  # a key has no index
        if self.count > MOST_VALUES:
            raise _TooManyValues
        return super().compose_node(parent, index)


class _Builder:
    """Turns a tree of YAML nodes into plain data, and collects marks and problems on the way."""

    def __init__(self, yaml: YAML, file: str) -> None:
        self.constructor = yaml.constructor
        self.file = file
        self.marks: dict[KeyPath, Mark] = {}
        self.problems: list[Problem] = []
        self.open: set[int] = set()  # collections under construction: meeting one again means it contains itself
        self.count = 0

    def build(self, node: Node, path: KeyPath) -> Any:
        self.count += 1
        if self.count > MOST_VALUES:
            raise UserError(_too_many(self.file))
        if len(self.open) > MOST_DEPTH:
            raise UserError(_too_deep(self.file))
        if isinstance(node, ScalarNode):
            return self._scalar(node, path)
        if id(node) in self.open:
            self._problem(node, path, "this alias refers to a value that contains it", "write the value out")
            return None
        if str(node.tag) not in (TAG + "map", TAG + "seq"):
            self._problem(node, path, f"the tag `{node.tag}` is not read", "remove it")
        self.open.add(id(node))
        try:
            if isinstance(node, SequenceNode):
                return [self._item(child, (*path, index)) for index, child in enumerate(node.value)]
            assert isinstance(node, MappingNode)
            return self._mapping(node, path)
        finally:
            self.open.discard(id(node))

    def _item(self, node: Node, path: KeyPath) -> Any:
        place = _place(node)
        self.marks[path] = Mark(self.file, place, place)
        return self.build(node, path)

    def _mapping(self, node: MappingNode, path: KeyPath) -> dict[str, Any]:
        result: dict[str, Any] = {}
        first: dict[str, Node] = {}
        merged: list[Node] = []
        for key, value in node.value:
            if not isinstance(key, ScalarNode):
                self._problem(key, path, "a key must be a single word", "remove the brackets")
            elif character := forbidden_character(key.value):
                self._problem(key, path, f"the key contains {character}, which is not allowed in text", "remove it")
            elif key.tag == MERGE:
                merged.extend(value.value if isinstance(value, SequenceNode) else [value])
            elif key.value in first:
                where = f"line {_place(first[key.value])[0]}"
                self._problem(
                    key,
                    (*path, key.value),
                    f"`{key.value}` is given twice (also {where})",
                    "keep one of them",
                )
            else:
                first[key.value] = key
                child = (*path, key.value)
                # An alias has the place of its anchor, which comes earlier; the key's is more useful.
                aliased = value.start_mark.index < key.start_mark.index
                empty = value.value == "" and value.tag == TAG + "null"
                at = _place(key) if aliased or empty else _place(value)
                self.marks[child] = Mark(self.file, _place(key), at)
                result[key.value] = self.build(value, child)
        for source in merged:
            if not isinstance(source, MappingNode):
                self._problem(source, path, "`<<` merges blocks only", "remove it")
                continue
            marks = dict(self.marks)
            extra = self.build(source, path)
            self.marks.update(marks)  # keys written here keep their own positions
            result = {**(extra or {}), **result}
        return result

    def _scalar(self, node: ScalarNode, path: KeyPath) -> Any:
        tag = str(node.tag)
        if tag in TEXT:
            if character := forbidden_character(node.value):
                self._problem(node, path, f"the text contains {character}, which is not allowed in text", "remove it")
            return node.value
        if tag not in TYPED:
            self._problem(node, path, f"the tag `{tag}` is not read", "remove it")
            return None
        try:
            value = self.constructor.construct_object(node)
            if isinstance(value, int) and not -(2**63) <= value < 2**63:
                raise OverflowError
            return value
        except (ValueError, OverflowError, MarkedYAMLError, KeyError):
            kind = {"int": "a whole number of 64 bits", "float": "a number"}.get(tag.removeprefix(TAG), "a value")
            self._problem(node, path, f"`{node.value[:40]}` cannot be read as {kind}")
            return None

    def _problem(self, node: Node, path: KeyPath, message: str, suggestion: str = "") -> None:
        line, column = _place(node)
        self.problems.append(Problem(message, suggestion, key=dotted(path), file=self.file, line=line, column=column))


def _too_deep(file: str) -> Problem:
    return Problem("brackets or blocks are nested too deeply", file=file, line=1, column=1)


def _too_many(file: str) -> Problem:
    advice = "write fewer, where an alias counts as all that it stands for"
    return Problem(f"more than {MOST_VALUES:,} values", advice, file=file, line=1, column=1)


def _place(node: Node) -> tuple[int, int]:
    return node.start_mark.line + 1, node.start_mark.column + 1


def _syntax_problem(error: MarkedYAMLError, file: str) -> Problem:
    mark = error.problem_mark or error.context_mark
    line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
    what = error.problem or str(error)
    for part, message, suggestion in _PLAIN_WORDS:
        if part in what:
            return Problem(message, suggestion, file=file, line=line, column=column)
    return Problem(f"this is not YAML: {what}", file=file, line=line, column=column)


# The parser's messages, and messages for a reader who does not know its grammar.
_PLAIN_WORDS = (
    ("'\\t' that cannot start", "a tab where YAML needs spaces", "indent and separate with spaces"),
    ("mapping values are not allowed", "a second `key:` on this line, or a wrong indentation",
     "give every key its own line, and put quotes around text that holds `: `"),
    ("but found another document", "a second document begins here",
     "remove the line `---`: one file holds one job"),
    ("end of stream while scanning a quoted", "a quotation mark is not closed", "close it on its line"),
    ("expected ',' or ']'", "a list is not closed, or a comma is missing", "write it as [one, two]"),
    ("expected ',' or '}'", "a block in braces is not closed, or a comma is missing",
     "write it as {key: value, key: value}"),
    ("expected <block end>", "this line is indented unlike those of its block",
     "indent the keys of one block equally"),
    ("could not find expected ':'", "a key without its `: `",
     "write `key: value`, with a space after the colon"),
    ("('{'", "a second object in braces begins here: this looks like a data file, not a job or a configuration",
     "give a data file as `data:` of a job"),
)  # fmt: skip
