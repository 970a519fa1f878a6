"""The paths that a job from the page may name: runs, uploads, and the folders that the page was started with."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from stoker.data.files.candidate_files import candidate_files
from stoker.errors import Problem, UserError
from stoker.job.conflicts.all_conflicts import STORES
from stoker.job.document.yaml_document import JobDocument, parse_mapping
from stoker.job.inputs import schema_file
from stoker.job.keys.key_paths import KeyPath
from stoker.job.paths import absolute, exists
from stoker.job.task_spec import Named
from stoker.job.trust import TRUST
from stoker.node_cache.urls import URL, WRAPPERS, scheme_of, without_secrets
from stoker.page.access.accounts import Account
from stoker.page.access.listed_urls import is_listed, is_remote
from stoker.page.access.named_in_job import named_in_job
from stoker.page.data_files.uploads import is_incomplete
from stoker.page.page_error import PageError, page_problem
from stoker.page.page_settings import PageSettings
from stoker.scoring.scorers import is_foreign

CODE = re.compile(r"\.py\b|^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")  # a file of Python, or an import path
INDEX = re.compile(r"\[\d+\]$")
CODE_TASKS = ("module",)
WRITTEN = (["output"], ["to"])
MASKED = re.compile(r"[:/]\*{3}@|=\*{3}(&|$)")  # as `mask_secrets` writes it
PATTERN = re.compile(r"[*?\[{]")
# Keys whose texts are names of files, models or data even without a slash; others are looked at where they have one.
NAMED = {"path", "name", "data", "model", "tokenizer", "template", "output", "to", "reference", "base", "file"}


def allowed_folders(settings: PageSettings) -> tuple[Path, ...]:
    """Returns the folders that jobs may read."""
    return (*settings.runs, settings.uploads, settings.state / "jobs", *settings.data)


def is_inside(path: Path, folders: tuple[Path, ...]) -> bool:
    """Returns whether a path, with its links resolved, is in one of some folders."""
    try:
        real = path.resolve()
    except (OSError, RuntimeError, ValueError):
        return False
    return any(real.is_relative_to(folder) for folder in folders)


def place_problem(value: str, base: Path, folders: tuple[Path, ...], *, is_written: bool = False) -> Problem | None:
    """Returns why a path or a pattern may not be used; None if it and all that it leads to is inside the folders."""
    text = _shown(value)
    if not _begins_inside(_written_out(value), base, folders):
        hint = "upload the file, or start the page with --data FOLDER"
        if is_written:
            hint = "write a folder below the page's folders of runs, which are those of --runs"
        return page_problem("`{text}` is not in a folder that this page may use", hint, text=text)
    try:
        if is_written or all(is_inside(path, folders) for path in _paths_of(value, base)):
            return None
    except OSError as error:
        return page_problem("`{text}` cannot be read: {reason}", text=text, reason=str(error.strerror))
    hint = "copy the files there, or start the page also with --data and the folder of the links' targets"
    return page_problem("`{text}` leads through a link out of the folders that this page may use", hint, text=text)


def _begins_inside(value: str, base: Path, folders: tuple[Path, ...]) -> bool:
    """Returns whether a path, or the part of a pattern before its first wildcard, is inside the folders."""
    if URL.match(value) or not value or ".." in Path(value).parts:
        return False
    fixed = PATTERN.split(value, maxsplit=1)[0]
    whole = Path(value) if fixed == value else Path(fixed).parent if not fixed.endswith("/") else Path(fixed)
    return is_inside(base / whole, folders)


def _written_out(value: str) -> str:
    """Returns a path without ``lmdb://`` and ``~``."""
    value = value[len("lmdb://") :] if _is_lmdb(value) else value
    return os.path.expanduser(value) if value.startswith("~") else value  # noqa: PTH111 -- no home: as written


def _paths_of(value: str, base: Path) -> Iterator[Path]:
    """Yields the files that a path or a pattern leads to, and the links below a folder.

    Raises:
        OSError: a folder may not be searched.
    """
    value = _written_out(value)
    yield from candidate_files(value, base)
    folder = absolute(value, base)
    if exists(folder) and folder.is_dir():
        yield from (path for path in folder.rglob("*") if path.is_symlink())


def document_of(text: str, name: str = "job.yaml") -> JobDocument:
    """Parses a job's text. Raises UserError if it is not a YAML mapping."""
    return parse_mapping(text, file=name)


def path_problems(
    document: JobDocument, settings: PageSettings, account: Account | None, *, scores: bool = True
) -> list[Problem]:
    """Returns problems of a job that reaches outside of the allowed folders, or runs code without the right to.

    Args:
        account: its user; None if the job is a run's own.
        scores: whether its scorers may run.
    """
    found: list[Problem] = []
    trusted = account is not None and account.may("admin")
    readable, writable = allowed_folders(settings), settings.runs
    refused, scorers = set(), set()
    try:
        for named, place in named_in_job(document):
            if (problem := _named_problem(named, settings, account, scores=scores)) is not None:
                found.append(_at(place, problem))
                refused.add(named.value)
            elif named.kind == "scorer":
                scorers.add((place.key, named.value))
    except UserError as error:
        found += [] if trusted else error.problems  # what its stages name is not known
    for path, value in _leaves(document.data):
        if isinstance(value, bool):
            if value and path and path[-1] in TRUST and not trusted:
                what = page_problem("`{text}` lets code run, which requires the role admin", text=str(path[-1]))
                found.append(_at(document.problem(path, ""), what))
            continue
        if not isinstance(value, str) or value in refused:
            continue
        place = document.problem(path, "")
        if (INDEX.sub("", place.key or ""), value) in scorers:  # checked; regex:abc looks like an import path
            continue
        text, words = value.strip(), _words(path)
        listed = is_listed(text, settings.urls)
        if not trusted and (problem := _needs_trust(text, words, listed=listed)) is not None:
            found.append(_at(place, problem))
        elif is_remote(text) and not _leads_on(text) and not trusted and not listed:
            hint = "start the page with --urls and how such addresses begin, as s3://bucket/folder"
            what = page_problem("`{text}` is at an address that this page was not given", hint, text=_shown(text))
            found.append(_at(place, what))
        is_written = words[-1:] in WRITTEN
        folders = writable if is_written or _is_store(text) else readable
        if _names_file(words, text, settings.base) and (
            problem := place_problem(text, settings.base, folders, is_written=is_written)
        ):
            found.append(_at(place, problem))
    return found


def author_of_own_job(account: Account) -> Account | None:
    """Returns for whom `path_problems` checks a run's own job that is to train again.

    A run's own job does not decide that code may run, except in the sandbox for an admin.
    """
    return None if account.may("admin") else account


def _named_problem(named: Named, settings: PageSettings, account: Account | None, *, scores: bool) -> Problem | None:
    """Returns why a job may not name something in its task's block; None if it may."""
    text, places = named.value, [named.value]
    match named.kind:
        case "address":
            foreign, places = account is not None, []
        case "scorer":
            foreign = scores and is_foreign(text, sandboxed=account is not None)
            places = [file] if (file := schema_file(text)) else []
        case "model" | "reward_model":
            foreign, places = False, [text, f"runs/{text}"]  # as `find_run` looks for it
        case _:
            foreign = False
    if foreign and not (account is not None and account.may("admin")):
        return page_problem("`{text}` runs code or contacts a server; this requires the role admin", text=text[:60])
    readable = allowed_folders(settings)
    named_places = (place for place in places if _names_file(["path"], place, settings.base))
    found = (place_problem(place, settings.base, readable) for place in named_places)
    return next((problem for problem in found if problem is not None), None)


def new_job_problems(document: JobDocument, settings: PageSettings, account: Account | None) -> list[Problem]:
    """Returns those of `path_problems`, and what a job that has not begun lacks: secrets, and parts of uploads."""
    found = path_problems(document, settings, account)
    for path, value in _leaves(document.data):
        text = value.strip() if isinstance(value, str) else ""
        if URL.match(text) and MASKED.search(text):
            what = page_problem("`{text}` has `***` in place of a secret", "write the secret", text=_shown(text))
            found.append(_at(document.problem(path, ""), what))
        elif _names_file(_words(path), text, settings.base) and (problem := incomplete_problem(text, settings)):
            found.append(_at(document.problem(path, ""), problem))
    return found


def incomplete_problem(value: str, settings: PageSettings) -> Problem | None:
    """Returns the problem of a path or pattern that leads to an upload of which a part is missing."""
    if not _begins_inside(_written_out(value), settings.base, allowed_folders(settings)):
        return None  # `place_problem` refuses it, and nothing elsewhere is searched
    try:
        names = [path.name for path in _paths_of(value, settings.base) if is_incomplete(path, settings.uploads)]
    except OSError:
        return None  # `place_problem` says so
    hint = "choose the same file again to continue"
    return page_problem("the upload of `{name}` is incomplete", hint, name=names[0][:80]) if names else None


def _at(place: Problem, problem: Problem) -> Problem:
    """Returns a problem at the place of another."""
    return replace(problem, key=place.key, file=place.file, line=place.line, column=place.column)


def _needs_trust(text: str, words: list[str], *, listed: bool) -> Problem | None:
    """Returns why only an admin may write a text at the keys ``words``; None if others may."""
    if CODE.search(text) or (words[-2:] == ["ranking", "model"] and ":" in text):
        return page_problem("`{text}` names code to run, which requires the role admin", text=text[:60])
    if words[-1:] == ["task"] and text in CODE_TASKS:
        return page_problem("task {text} runs code, which requires the role admin", text=text)
    if not listed and is_remote(text) and (words[-1:] in WRITTEN or _is_store(text)):
        return page_problem("`{text}` is written to, which requires the role admin", text=_shown(text))
    return None


def _leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yields the values, each with its place."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, (*path, str(key)))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _leaves(inner, (*path, index))
    else:
        yield path, value


def _words(path: KeyPath) -> list[str]:
    """Returns the keys of a path without indices; a key such as ``ranking.model`` is two.

    A source's names for its columns, such as ``columns.output``, are no keys of the job.
    """
    path = path[:-1] if path[-2:-1] == ("columns",) else path
    return [word for part in path if isinstance(part, str) for word in part.split(".")]


def _is_lmdb(text: str) -> bool:
    return text.lower().startswith("lmdb://")


def _is_store(text: str) -> bool:
    return bool(URL.match(text)) and scheme_of(text) in STORES


def _leads_on(url: str) -> bool:
    """Returns whether a URL contains another one."""
    return scheme_of(url) in WRAPPERS or "::" in url


def _shown(text: str) -> str:
    """Returns a text for messages: a URL without its password."""
    return (without_secrets(text) if URL.match(text) else text)[:80]


def _names_file(words: list[str], value: str, base: Path) -> bool:
    """Returns whether a text at some keys names a file: it looks like a path, or a file of that name exists."""
    named = bool(set(words[-1:]) & NAMED)
    if "\n" in value or len(value) > 4096:
        # A text; but not where a pattern is expected, whose character class may contain a line feed.
        return (named and words[-1] != "template") or os.path.lexists(base / value)
    if URL.match(value):
        return not is_remote(value) or _leads_on(value)
    parts = value.replace("\\", "/").split("/")
    looked_for = (named and words[-1] != "template") or ("/" in value and not re.search(r"\s", value))
    if words[-1:] in WRITTEN or (looked_for and PATTERN.search(value)):
        return True  # a pattern may match files although no file has its name
    if value.startswith(("/", "~")) or ".." in parts:
        return bool(set(words) & NAMED) or value.startswith("~") or os.path.lexists(base / value) or ".." in parts
    if "/" in value or named:
        return os.path.lexists(base / value)
    return bool(re.search(r"\.(jsonl?|csv|tsv|parquet|txt|tar|gguf|jinja|ya?ml|py)(\.(gz|zst))?$", value)) and (
        os.path.lexists(base / value)
    )


def refuse(problems: list[Problem]) -> None:
    """Raises the first problem as an error of the API."""
    if problems:
        raise PageError(403, problems[0])
