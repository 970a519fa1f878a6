"""Checks a job's text with `stoker check`, if none of its paths is forbidden."""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool

from stoker.errors import Problem, UnknownColumns, UserError
from stoker.job.document.yaml_document import JobDocument
from stoker.job.load_job import STAGES, check_document, problem_order
from stoker.page.access.job_paths import document_of, new_job_problems, path_problems
from stoker.page.page_error import page_problem
from stoker.page.page_settings import PageSettings
from stoker.page.processes.job_queue import visible_gpus
from stoker.page.routing import Page

ProblemsOf = Callable[[JobDocument, PageSettings, Any], list[Problem]]
CHECK_SECONDS = 60.0
TEMPORARY = re.compile(r"^.*/\.check-[^/]+/job\.yaml")  # the file that a job is checked in


@contextmanager
def written_job(page: Page, text: str) -> Iterator[Path]:
    """A job's text as a file for the time of a verb."""
    with tempfile.TemporaryDirectory(dir=page.settings.state / "jobs", prefix=".check-") as folder:
        path = Path(folder) / "job.yaml"
        path.write_text(text, encoding="utf-8")
        yield path


async def check_job_text(
    page: Page,
    text: str,
    account: Any,
    overrides: list[str] | None = None,
    *,
    problems_of: ProblemsOf = new_job_problems,
) -> tuple[list[Problem], dict[str, Any]]:
    """Returns the problems of a job, and the output of `stoker check --json`.

    Args:
        problems_of: finds the problems for which the job is not checked at all.
    """
    try:
        document = await run_in_threadpool(document_of, text)
    except UserError as error:
        return list(error.problems), {}
    outside = await run_in_threadpool(problems_of, document, page.settings, account)
    if outside:  # nothing that opens the files may run: its messages would reveal which files exist
        return sorted(outside + await run_in_threadpool(_written_problems, document), key=problem_order), {}
    with written_job(page, text) as path:
        result = await page.verbs.run(["check", str(path), "--json", *(overrides or [])], seconds=CHECK_SECONDS)
        found = result.fields
        if not found:
            return [page_problem("`stoker check` failed: {line}", line=result.last_line)], {}
        problems = [problem_of(each, str(path)) for each in found.get("errors", [])]
    return problems, found


async def devices_of_job(page: Page, text: str, account: Any) -> int:
    """Returns the number of GPUs of a job that is started without a check; 0 if it has errors, or there are no GPUs."""
    if not await run_in_threadpool(visible_gpus):
        return 0
    return devices_wanted((await check_job_text(page, text, account, problems_of=path_problems))[1])


def devices_wanted(answer: dict[str, Any]) -> int:
    """Returns the number of GPUs of a job, from the output of `stoker check`; 0 if the planner decides it."""
    found = []
    for each in answer.get("stages") or [answer]:
        parts = (each.get("job") or {}).get("parallel") or {}
        sizes = [parts.get(axis) for axis in ("data", "tensor", "pipeline", "context")]
        whole = [size for size in sizes if isinstance(size, int)]
        if each.get("plan") or len(whole) < len(sizes):
            return 0
        found.append(math.prod(whole))
    return max(found, default=0)


def _written_problems(document: JobDocument) -> list[Problem]:
    """Returns the problems that can be seen without looking for any file."""
    if isinstance(document.data, dict) and STAGES in document.data:
        return []
    try:
        check_document(document)
    except UserError as error:
        return list(error.problems)
    return []


def problem_of(each: dict[str, Any], path: str) -> Problem:
    """Returns a problem of a verb's JSON, without the name of the temporary file."""

    def text(key: str) -> str:
        return str(each.get(key, "")).replace(path, "job.yaml")

    columns = each.get("columns") or None
    return Problem(
        text("message"),
        text("suggestion"),
        text("key"),
        text("file"),
        line=int(each.get("line", 0)),
        column=int(each.get("column", 0)),
        repeats=bool(each.get("repeats")),
        columns=columns and UnknownColumns(tuple(columns["names"]), tuple(map(tuple, columns["needed"]))),
        missing_file=str(each.get("missing_file", "")),
    )


def resolved_keys(answer: dict[str, Any]) -> dict[str, Any]:
    """Returns the value of every leaf with its origin, by dotted key."""
    job = answer.get("job")
    origins = answer.get("origins") or {}
    return {
        key: {"value": _at(job, key), **origin, "where": TEMPORARY.sub("job.yaml", origin["where"])}
        for key, origin in origins.items()
    }


def _at(value: Any, key: str) -> Any:
    for part in re.findall(r"[^.\[\]]+", key):
        if isinstance(value, list):
            value = value[int(part)] if part.isdecimal() and int(part) < len(value) else None
        elif isinstance(value, dict):
            value = value.get(part)
    return value
