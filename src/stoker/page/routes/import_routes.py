"""Routes that import other tools' files as a job, as `stoker import` does."""

from __future__ import annotations

import shlex
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.routing import Route

from stoker.errors import Problem, UserError
from stoker.job.importers import FORMATS, is_own_job
from stoker.page.access.job_paths import document_of
from stoker.page.data_files.file_names import file_name, shortened
from stoker.page.jobs.job_check import problem_of
from stoker.page.page_error import PageError, bad_request, page_problem, passed_on
from stoker.page.request_values import number_of, read_object, text_of
from stoker.page.routing import Page, route

SECONDS = 60.0
MOST_FILES = 10
LONGEST_NAME = 1000  # characters of a name as it is given; that of the file is shorter
SUFFIX = 20  # bytes at most of what is kept as the ending of a long name


def import_routes(page: Page) -> list[Route]:
    """Returns the route of imports."""
    return [route("/api/import", _ImportRoutes(page).run, method="POST", role="run")]


@dataclass(frozen=True)
class _ImportRoutes:
    page: Page

    async def run(self, request: Request) -> Any:
        """Returns the job of some files, and the keys that are lost; a job of Stoker as it is, with ``own``."""
        body = await read_object(request)
        one = {"name": body.get("file", "config.yaml"), "text": body.get("contents")}
        files = body.get("files", [one] if "contents" in body else None)
        if not isinstance(files, list) or not 0 < len(files) <= MOST_FILES:
            raise bad_request("`files` must be a list of {name, text}", "or give `file` and `contents`")
        if len(files) == 1 and "format" not in body and await run_in_threadpool(_is_own, files[0]):
            name = text_of(files[0], "name", default="job.yaml", most=LONGEST_NAME)
            return {"yaml": files[0]["text"], "own": True, "command": shlex.join(["stoker", "check", name])}
        words: list[str] = []
        if form := text_of(body, "format", default="", most=40):
            if form not in FORMATS:
                raise bad_request(
                    "there is no format {name}", "take one of {known}", name=form, known=", ".join(FORMATS)
                )
            words += ["--from", form]
        if body.get("processes") is not None:
            words += ["--processes", str(number_of(body, "processes", least=1, most=100_000))]
        with tempfile.TemporaryDirectory(dir=self.page.settings.state / "jobs", prefix=".import-") as name:
            folder = Path(name)
            names = [self._write(folder, each) for each in files]
            register = [n for n in names if n == "dataset_info.json"]
            words += ["--data-info", register[0]] if register and len(names) > 1 else []
            listed = [n for n in names if n not in register] or names
            result = await self.page.verbs.run(
                ["import", *listed, *words, "--only-given", "--json"], seconds=SECONDS, cwd=folder
            )
        answer = result.fields
        if not answer.get("yaml"):
            errors = answer.get("errors") or []
            if errors:
                raise PageError(400, _in_page(problem_of(errors[0], str(folder))))
            raise passed_on(400, result.last_line)
        return answer | {"command": shlex.join(["stoker", "import", *listed, *words])}

    def _write(self, folder: Path, each: Any) -> str:
        """Writes a file to be imported. Files that it names are read only where they were given as well.

        Raises:
            PageError: its name is empty, or that of an earlier file.
        """
        if not isinstance(each, dict):
            raise bad_request("`files` must be a list of {name, text}")
        name, text = text_of(each, "name", default="config.yaml", most=LONGEST_NAME), text_of(each, "text")
        found = file_name(name)
        if not found:
            raise bad_request("`{name}` is not a name of a file", name=name[:60])
        ending = PurePath(found).suffix
        name = shortened(found, ending if len(ending.encode()) <= SUFFIX else "")
        if (folder / name).exists():
            raise bad_request("two files are named `{name}`", "rename one of them", name=name[:60])
        (folder / name).write_text(text, encoding="utf-8")
        return name


def _is_own(file: Any) -> bool:
    """Returns whether a file is a job of Stoker."""
    text = file.get("text") if isinstance(file, dict) else None
    try:
        return isinstance(text, str) and is_own_job(document_of(text))
    except UserError:  # it is not a YAML mapping
        return False


def _in_page(problem: Problem) -> Problem:
    """Returns a problem of the verb; if a file is missing, with advice for the page instead of an option."""
    if not problem.missing_file:
        return problem
    hint = page_problem("", "drop the `{file}` that has it, too", file=problem.missing_file)
    return replace(problem, suggestion=hint.suggestion)
