"""The English texts of modules that the page can show: what stands in the source where a person is told something."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

HOLE = re.compile(r"\{\w*\}")
QUOTED = re.compile(r"`[^`]*`")
FOR_PROGRAMMERS = {
    "add_argument",
    "ArgumentParser",
    "add_parser",
    "TypeError",
    "AssertionError",
    "RuntimeError",
    "compile",
}


def forms(path: Path) -> Iterator[tuple[int, str]]:
    """The texts of a module with their lines; each value is written ``{}``, the ending of a plural ``{s}``.

    Left out are docstrings, what arguments of the command line mean, assertions, errors that are bugs, patterns.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr | ast.Assert):
            inner = [node.value] if isinstance(node, ast.Expr) else [node]
            for each in inner:
                if isinstance(each, ast.Constant | ast.Assert):
                    skipped.update(id(part) for part in ast.walk(each))
        if isinstance(node, ast.Call) and _name(node.func) in FOR_PROGRAMMERS:
            skipped.update(id(part) for part in ast.walk(node))
        if isinstance(node, ast.JoinedStr):
            skipped.update(id(part) for part in node.values)
    for node in ast.walk(tree):
        if id(node) not in skipped and (text := _text(node)) and is_prose(text):
            yield node.lineno, text  # type: ignore[attr-defined]


def is_prose(text: str) -> bool:
    """Whether a text is for people to read: words with spaces between them, outside of code."""
    plain = HOLE.sub("0", QUOTED.sub("0", text))
    return bool(re.search(r"[a-z]{2,}", plain) and re.search(r"[a-z0-9,;:)'\"] +[a-z0-9(\"']", plain, re.IGNORECASE))


def normal(form: str) -> str:
    """A form of the table as `forms` writes it."""
    return HOLE.sub(lambda hole: hole[0] if hole[0] == "{s}" else "{}", form)


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(each.value) if isinstance(each, ast.Constant) else _hole(each) for each in node.values)
    return ""


def _hole(node: ast.expr) -> str:
    endings = {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
    return "{s}" if endings & {"s", "es"} else "{}"


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
