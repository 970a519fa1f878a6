"""Which paths a job that comes through the page may name: runs, uploads, and the folders that the page was given."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stoker.errors import Problem
from stoker.job.key_paths import KeyPath
from stoker.job.yaml_document import JobDocument, parse_mapping
from stoker.node_cache.urls import URL, WRAPPERS, is_url, scheme_of
from stoker.page.accounts import Account
from stoker.page.page_error import PageError
from stoker.page.settings import PageSettings

CODE = re.compile(r"\.py\b|^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")  # a file of Python, or an import path
TRUST = ("trust_remote_code", "allow_pickle")
CODE_TASKS = ("module",)
# Keys whose texts are names of files, models or data even without a slash; others are looked at where they have one.
NAMED = {"path", "name", "data", "model", "tokenizer", "template", "output", "to", "reference", "base", "file"}
HINT = "upload the file, or start the page with --data FOLDER"


def allowed_folders(settings: PageSettings) -> tuple[Path, ...]:
    """The folders that jobs may read."""
    return (*settings.runs, settings.uploads, settings.state / "jobs", *settings.data)


def is_inside(path: Path, folders: tuple[Path, ...]) -> bool:
    """Whether a path, with its links followed, is in one of some folders."""
    try:
        real = path.resolve()
    except (OSError, RuntimeError, ValueError):
        return False
    return any(real.is_relative_to(folder) for folder in folders)


def document_of(text: str, name: str = "job.yaml") -> JobDocument:
    """A job's text as data. Raises UserError for what is no mapping in YAML."""
    return parse_mapping(text, file=name)


def path_problems(document: JobDocument, settings: PageSettings, account: Account | None) -> list[Problem]:
    """What in a job reaches outside of the allowed folders, or runs code where its author may not.

    Args:
        account: who asks for it; None where the job is only looked at, and no code is run for that.
    """
    found: list[Problem] = []
    trusted = account is not None and account.may("admin")
    readable, writable = allowed_folders(settings), settings.runs
    for path, value in _leaves(document.data):
        if isinstance(value, bool):
            if value and path and path[-1] in TRUST and not trusted:
                found.append(document.problem(path, f"`{path[-1]}` lets code run, which needs the role admin"))
            continue
        if path == ("task",) and value in CODE_TASKS and not trusted:
            found.append(document.problem(path, f"task {value} runs code, which needs the role admin"))
        if not isinstance(value, str):
            continue
        if CODE.search(value) and not trusted:
            found.append(document.problem(path, f"`{value[:60]}` names code to run, which needs the role admin"))
        folders = writable if path[-1:] in (("output",), ("to",)) else readable
        if _names_file(path, value, settings.base) and not _is_allowed(value, settings.base, folders):
            what = f"`{value[:80]}` is not in a folder that this page may use"
            found.append(document.problem(path, what, HINT))
    return found


def _leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, (*path, str(key)))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _leaves(inner, (*path, index))
    else:
        yield path, value


def _names_file(path: KeyPath, value: str, base: Path) -> bool:
    """Whether a text leads to a file: it looks like a path, or there is something of its name."""
    if "\n" in value or len(value) > 4096:
        return False
    if URL.match(value):
        return not is_url(value) or scheme_of(value) in WRAPPERS or "::" in value
    words = [str(part) for part in path if isinstance(part, str)]
    if words[-1:] in (["output"], ["to"]):
        return True
    parts = value.replace("\\", "/").split("/")
    if value.startswith(("/", "~")) or ".." in parts:
        return bool(set(words) & NAMED) or value.startswith("~") or os.path.lexists(base / value) or ".." in parts
    if "/" in value or set(words[-1:]) & NAMED:
        return os.path.lexists(base / value)
    return bool(re.search(r"\.(jsonl?|csv|tsv|parquet|txt|tar|gguf|jinja|ya?ml|py)(\.(gz|zst))?$", value)) and (
        os.path.lexists(base / value)
    )


def _is_allowed(value: str, base: Path, folders: tuple[Path, ...]) -> bool:
    """Whether a path is inside of the folders; a pattern is judged by the part before its first wildcard."""
    if URL.match(value):
        return False
    if value.startswith("~"):
        value = os.path.expanduser(value)  # noqa: PTH111 -- a user without a home stays as written
    if ".." in Path(value).parts:
        return False
    fixed = re.split(r"[*?\[{]", value, maxsplit=1)[0]
    whole = Path(value) if fixed == value else Path(fixed).parent if not fixed.endswith("/") else Path(fixed)
    return is_inside(base / whole, folders)


def refuse(problems: list[Problem]) -> None:
    """Raises the first problem as an error of the API."""
    if problems:
        raise PageError(403, problems[0])
