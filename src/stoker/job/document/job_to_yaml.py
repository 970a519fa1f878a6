"""Writes a job as YAML text: the run folder's ``job.yaml``, and the output of ``stoker check``."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import takewhile
from typing import Any, TypeVar

from stoker.errors import UserError
from stoker.job.conflicts.all_conflicts import has_effect
from stoker.job.document.yaml_document import parse_value
from stoker.job.keys.key_paths import KeyPath, block_at, field_at, leaves
from stoker.job.schema import Job

INDENT = 2
T = TypeVar("T")


def scalar(value: Any) -> str:
    """Formats a value on one line of YAML that is read back as the same value."""
    if isinstance(value, list):
        return "[" + ", ".join(scalar(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{scalar(str(key))}: {scalar(item)}" for key, item in value.items()) + "}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        text = f"{value:.12g}" if float(f"{value:.12g}") == value else repr(value)
        return re.sub(r"e\+?(-?)0*(\d)", r"e\1\2", text)
    return str(value) if isinstance(value, int) else _text(str(value))


def comment_lines(text: str, width: int, lead: str = "# ", further: str = "") -> list[str]:
    """Wraps a text into lines of a comment; ``further`` replaces the lead of the lines after the first."""
    return textwrap.wrap(
        text,
        width,
        initial_indent=lead,
        subsequent_indent=further or lead,
        break_on_hyphens=False,
        break_long_words=False,
    )


@lru_cache(4096)  # a job's texts are mostly the same few names
def _text(text: str) -> str:
    """Formats a text, without quotes if it is then read back as the same text, also inside brackets."""
    if re.fullmatch(r"[A-Za-z0-9_./~+-][A-Za-z0-9_./:+* -]*", text) and not text.endswith((" ", ":")):
        try:
            if parse_value(text) == text and parse_value(f"[{text}]") == [text]:
                return text
        except UserError:
            pass
    escapes = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
    quoted = "".join(escapes.get(c, c) if c in escapes or c.isprintable() else _escaped(c) for c in text)
    return f'"{quoted}"'


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def job_lines(job: Job) -> Iterator[tuple[str, KeyPath | None]]:
    """Yields the job as YAML lines, each with the path of its leaf; None for the line that opens a block.

    Null values of keys whose default is null, and keys without effect in this job, are left out: reading the lines
    gives the same job.
    """
    shown = (
        (path, scalar(value))
        for path, value in leaves(job)
        if (value is not None or _default(path) is not None)
        and has_effect(job, path)
        and not (value == [] and block_at(path) is None and path[-1] == "data")
    )
    for start, path, text in nested(shown):
        yield (f"{start}:", None) if text is None else (f"{start}: {text}", path)


def _default(path: KeyPath) -> Any:
    field, _ = field_at(path)
    return None if field is None else field.get_default(call_default_factory=True)


def nested(items: Iterable[tuple[KeyPath, T]]) -> Iterator[tuple[str, KeyPath, T | None]]:
    """Yields the indented keys of a YAML file with these leaves; the keys of enclosing blocks have the value None.

    Each comes with its path and its value; the first leaf of a list's item has a dash before it.
    """
    opened: KeyPath = ()
    dash = False
    for path, value in items:
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(opened, path[:-1], strict=False)))
        for depth in range(common, len(path) - 1):
            if isinstance(path[depth], int):
                dash = True
            else:
                yield f"{_indent(path[:depth], False)}{path[depth]}", path[: depth + 1], None
        opened = path[:-1]
        yield f"{_indent(opened, dash)}{path[-1]}", path, value
        dash = False


def _indent(path: KeyPath, dash: bool) -> str:
    spaces = " " * (INDENT * len(path))
    return spaces[:-INDENT] + "- " if dash else spaces


def dump_job(job: Job) -> str:
    """Returns the job as YAML; reading it gives the same job."""
    return "".join(line + "\n" for line, _ in job_lines(job))
