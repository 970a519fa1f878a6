"""``stoker check --fix``: brings an older or foreign job file to this schema, keeping its comments."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from stoker.errors import UserError
from stoker.job.document.shorthand import MAIN_KEY, SOURCE_LISTS, expand_shorthands
from stoker.job.document.yaml_document import JobDocument, Mark, parse_document
from stoker.job.keys.key_paths import KeyPath, block_at, dotted
from stoker.job.keys.suggest_key import suggest_key
from stoker.job.load_job import STAGES
from stoker.job.schema import SCHEMA_VERSION

# A line with one key and a one-line value: not a block, not a multi-line string.
_KEY_LINE = re.compile(r"^(?P<indent> *)(?P<dash>- )?(?P<key>[\w-]+):(?P<space> +)(?P<rest>[^\s#|>&*!].*)$")

_NOWHERE = Mark("", (0, 0), (0, 0))


@dataclass(frozen=True)
class Migration:
    """One change, described, and the text after it."""

    what: str
    text: str


def fix(text: str, file: str) -> tuple[str, list[str]]:
    """Applies every unambiguous change to the text, and describes each change.

    Adds a missing ``version``; renames misspelt keys; moves keys that belong to another block or have another
    tool's name. Ambiguous keys are left unchanged. Raises UserError if the text is not YAML.
    """
    changes: list[str] = []
    skipped: set[KeyPath] = set()
    while (change := _next_change(text, file, skipped)) is not None:
        text = change.text
        changes.append(change.what)
    return text, changes


def _next_change(text: str, file: str, skipped: set[KeyPath]) -> Migration | None:
    document = parse_document(text, file)
    if not isinstance(document.data, dict):
        return None
    for path, mark in document.marks.items():
        key, parent = path[-1], _parent(document, path)
        block = block_at(parent)
        if (
            not isinstance(key, str)
            or block is None
            or path == (STAGES,)
            or key in block.model_fields
            or path in skipped
        ):
            continue
        near = suggest_key(parent, key)
        target = near.target
        if not near.certain or target is None or _written(document, target) is not None:
            continue
        same_block = target[:-1] == parent
        change = _rename(text, path, mark, target) if same_block else _move(text, document, path, target)
        if change is not None and _arrived(change, file, target, document.at(path)):
            return change
        skipped.add(path)
    if "version" not in document.data:
        change = _add_version(text, document)
        if change is not None and _arrived(change, file, ("version",), SCHEMA_VERSION):
            return change
    return None


def _arrived(change: Migration, file: str, target: KeyPath, value: Any) -> bool:
    """Returns whether the changed text has the value at its target: a line inside a bracket cannot be moved."""
    try:
        document = parse_document(change.text, file)
    except UserError:
        return False
    if len(target) == 1:
        value = expand_shorthands(JobDocument(file, {target[0]: value}, {target: _NOWHERE})).data[target[0]]
    return bool(_written(document, target) == value)


def _parent(document: JobDocument, path: KeyPath) -> KeyPath:
    """Returns the path of the block that contains a key, after shorthands are expanded."""
    parent = path[:-1]
    is_single_source = parent in SOURCE_LISTS and isinstance(document.at(parent), dict)
    return (*parent, 0) if is_single_source else parent


def _written(document: JobDocument, target: KeyPath) -> Any:
    """Returns the value at a path with the shorthands expanded; None if it is missing."""
    try:
        return expand_shorthands(document).at(target)
    except KeyError:
        return None


def _rename(text: str, path: KeyPath, mark: Mark, target: KeyPath) -> Migration | None:
    lines = text.splitlines(keepends=True)
    line, column = mark.key[0] - 1, mark.key[1] - 1
    old = str(path[-1])
    if not lines[line][column:].startswith(old):  # a key in quotes
        return None
    lines[line] = lines[line][:column] + str(target[-1]) + lines[line][column + len(old) :]
    return Migration(f"`{dotted(path)}` is now `{target[-1]}`", "".join(lines))


def _move(text: str, document: JobDocument, path: KeyPath, target: KeyPath) -> Migration | None:
    """Moves a key's line to the block where it belongs."""
    lines = text.splitlines(keepends=True)
    at = document.marks[path].key[0] - 1
    found = _KEY_LINE.match(lines[at].rstrip("\r\n"))
    alone = found is not None and found["dash"] is None and found["key"] == path[-1]
    value = document.at(path)
    if not alone or found is None or isinstance(value, dict | list) or len(document.at(path[:-1])) == 1:
        return None
    if at + 1 < len(lines) and re.match(rf"^{found['indent']} +[^\s#]", lines[at + 1]):
        return None  # the value continues on the next line
    end = "\r\n" if lines[at].endswith("\r\n") else "\n"
    del lines[at]
    rest = "".join(lines)
    what = f"`{dotted(path)}` is now `{dotted(target)}`"
    written = f"{target[-1]}: {found['rest']}"
    if len(target) == 1:
        return Migration(what, _ended(rest, end) + written + end)
    holder = parse_document(rest, document.file)
    mark = holder.marks.get(target[:1])
    if mark is None:
        return Migration(what, f"{_ended(rest, end)}{target[0]}:{end}  {written}{end}")
    return _into_block(what, rest, mark, f"{written}{end}")


def _into_block(what: str, text: str, mark: Mark, written: str) -> Migration | None:
    lines = text.splitlines(keepends=True)
    at = mark.key[0] - 1
    key = re.match(r"^(?P<key>[\w-]+):(?P<space> *)(?P<rest>[^#\r\n]*?)(?P<note> *(#.*)?)(?P<end>\r?\n?)$", lines[at])
    if key is None:
        return None
    if not key["rest"]:
        first = mark.value if mark.value != mark.key else (0, 3)
        indent = " " * (first[1] - 1)
        if first[0] == at + 1:
            return None
    elif key["key"] in MAIN_KEY and key["rest"][0] not in "{[&*!|>":
        indent = "  "
        end = key["end"] or "\n"
        lines[at] = f"{key['key']}:{key['note']}{end}{indent}{MAIN_KEY[key['key']]}: {key['rest']}{end}"
    else:
        return None
    lines[at] = _ended(lines[at], "\n")
    lines.insert(at + 1, indent + written)
    return Migration(what, "".join(lines))


def _add_version(text: str, document: JobDocument) -> Migration | None:
    if not document.marks:
        return None
    line, column = min(mark.key for mark in document.marks.values())
    if column != 1:  # the whole file in braces
        return None
    lines = text.splitlines(keepends=True)
    end = "\r\n" if lines[line - 1].endswith("\r\n") else "\n"
    lines.insert(line - 1, f"version: {SCHEMA_VERSION}{end}")
    return Migration(f"`version: {SCHEMA_VERSION}` is added", "".join(lines))


def _ended(text: str, end: str) -> str:
    return text if not text or text.endswith("\n") else text + end
