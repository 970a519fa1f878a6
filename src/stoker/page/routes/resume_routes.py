"""Routes that resume a run, also with changed keys, and check which changes it accepts."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.routing import Route

from stoker.errors import Problem, UserError
from stoker.job.document.overrides import apply_overrides
from stoker.job.document.text_file import read_text
from stoker.job.document.yaml_document import JobDocument
from stoker.job.keys.key_paths import parse_key
from stoker.job.load_job import STAGES
from stoker.page.access.accounts import Account
from stoker.page.access.guard import account_of
from stoker.page.access.job_paths import document_of, path_problems, refuse
from stoker.page.access.mask_secrets import mask_secrets
from stoker.page.jobs.job_check import CHECK_SECONDS, devices_of_job, devices_wanted, problem_of
from stoker.page.page_error import PageError, bad_request, http_error, page_problem, problem_json
from stoker.page.request_values import read_object
from stoker.page.routes.job_routes import put_in_queue
from stoker.page.routing import Page, route
from stoker.page.run_data.run_index import id_of
from stoker.page.run_data.run_view import job_text, job_values
from stoker.page.run_data.stage_views import run_folders
from stoker.runs.run_folder import RunFolder

ENDS_WITHIN, POLL = 10.0, 0.1  # seconds that the process of a run that has stopped gets to end
MOST_CHANGES = 100


def resume_routes(page: Page) -> list[Route]:
    """Returns the routes that resume a run."""
    own = _ResumeRoutes(page)
    return [
        route("/api/runs/{id}/resume", own.resume, method="POST", role="run"),
        route("/api/runs/{id}/resume-check", own.check, method="POST", role="run"),
    ]


@dataclass(frozen=True)
class _ResumeCommand:
    """The command that resumes a run.

    Attributes:
        run: its folder; of a stage that of its whole job.
        cwd: the folder in which the command and its relative paths begin.
        words: ``train JOB key=value ...``.
    """

    run: Path
    job: Path
    cwd: Path
    words: list[str]

    def with_changes(self, changes: Sequence[str]) -> _ResumeCommand:
        """Returns the command with changed keys, which replace earlier values of the same keys."""
        changed = {_key(change) for change in changes}
        kept = [word for word in self.words[2:] if _key(word) not in changed]
        return replace(self, words=[*self.words[:2], *kept, *changes])

    def document(self) -> JobDocument:
        """Returns its job file."""
        return document_of(read_text(self.job))


@dataclass(frozen=True)
class _ResumeRoutes:
    page: Page

    async def resume(self, request: Request) -> Any:
        """Resumes a run from its newest checkpoint, with the command that began it; a stage with its whole job."""
        account, changes = account_of(request, "run"), _changes_of(await read_object(request))
        folder = await run_in_threadpool(self.page.folder_of, request.path_params["id"])
        earlier = await run_in_threadpool(self.page.job_of, folder.path)
        if changes:
            problems, answer = await self._checked(folder, changes, account)
            if problems:
                raise PageError(400, problems[0])
            if refused := answer.get("resume", {}).get("refused"):
                names = ", ".join(f"`{each['key']}`" for each in refused)
                hint = "fork its job: that run starts over with them"
                raise http_error(409, "the run cannot go on with other values of {names}", hint, names=names)
            devices = devices_wanted(answer)
        elif earlier is not None:
            devices = earlier[0].devices
        else:  # it was started on the command line
            text = await run_in_threadpool(job_text, folder)
            devices = await devices_of_job(self.page, text, account)
        return await run_in_threadpool(self._resume, folder, account, devices, changes)

    async def check(self, request: Request) -> Any:
        """Returns with which changed keys a run resumes, and which of them need another run."""
        account, changes = account_of(request, "run"), _changes_of(await read_object(request))
        folder = await run_in_threadpool(self.page.folder_of, request.path_params["id"])
        problems, answer = await self._checked(folder, changes, account)
        found = answer.get("resume", {})
        return {
            "problems": [problem_json(problem) for problem in problems],
            "accepted": found.get("accepted", []),
            "refused": found.get("refused", []),
        }

    async def _checked(
        self, folder: RunFolder, changes: list[str], account: Account
    ) -> tuple[list[Problem], dict[str, Any]]:
        """Returns the problems of a run's job with changed keys, and the output of `stoker check --json`."""
        command = await run_in_threadpool(self._command, folder)
        if problems := await run_in_threadpool(self._problems, command, changes, account):
            return problems, {}
        _, job, *overrides = command.with_changes(changes).words
        words = ["check", job, *overrides, "--json"]
        result = await self.page.verbs.run(words, seconds=CHECK_SECONDS, cwd=command.cwd)
        if not result.fields:
            return [page_problem("`stoker check` failed: {line}", line=mask_secrets(result.last_line))], {}
        answer = mask_secrets(result.fields)
        return [problem_of(each, job) for each in answer.get("errors", [])], answer

    def _problems(self, command: _ResumeCommand, changes: list[str], account: Account) -> list[Problem]:
        """Returns the problems of changes and of paths, with which a job is neither checked nor resumed."""
        document = command.document()
        if changes and STAGES in document.data:
            return [page_problem("a job with stages goes on without changes", "edit a copy of the job")]
        if changes:
            before, _ = apply_overrides(document, command.words[2:])
            document, problems = apply_overrides(before, changes)
            if not problems and document.data.get("output") != before.data.get("output"):
                problems = [page_problem("a run goes on in its own folder", "omit `output`")]
            if problems:
                return problems
        settings = replace(self.page.settings, base=command.cwd)
        return path_problems(document, settings, account)

    def _command(self, folder: RunFolder) -> _ResumeCommand:
        """Returns the command that resumes a run: that of its job in the queue, or one for its own job file."""
        settings, earlier = self.page.settings, self.page.job_of(folder.path)
        if earlier is not None and (job := Path(earlier[0].job)).is_file():
            return _ResumeCommand(Path(earlier[0].run), job, earlier[1].cwd, shlex.split(earlier[0].command)[1:])
        output, words = settings.shown(folder.path), ["train", settings.shown(folder.job)]
        words += [f"output={output}"] if job_values(folder).get("output") != output else []
        return _ResumeCommand(folder.path, folder.job, settings.base, words)

    def _is_ending(self, folder: RunFolder) -> bool:
        """Returns whether the run has recorded its end, but its process is still exiting."""
        summary, earlier = self.page.views.summary(folder), self.page.job_of(folder.path)
        if summary["status"] == "running" or earlier is None or earlier[1].state != "running":
            return False
        return (earlier[1].times()[0] or 0.0) <= (summary["updated"] or 0.0)

    def _resume(self, folder: RunFolder, account: Account, devices: int, changes: list[str]) -> Any:
        page = self.page
        until = time.monotonic() + ENDS_WITHIN
        while self._is_ending(folder) and time.monotonic() < until:
            time.sleep(POLL)
        begun = self._command(folder)
        if any(each.is_taken() for each in run_folders(begun.run)):
            raise http_error(409, "{run} is training", run=begun.run.name)
        refuse(self._problems(begun, changes, account))
        command = begun.with_changes(changes)
        run, cwd = command.run, command.cwd
        entry = put_in_queue(page, command.words, run=run, job=command.job, user=account.name, devices=devices, cwd=cwd)
        line = entry.command if cwd == page.settings.base else f"(cd {shlex.quote(str(cwd))} && {entry.command})"
        page.audit.write(account.name, "resume", command=line, run=str(run))
        return {"id": id_of(run), "number": entry.number, "command": line}


def _changes_of(body: dict[str, Any]) -> list[str]:
    """Returns the changed keys of a request, each ``key=value``."""
    given = body.get("changes", [])
    if not isinstance(given, list) or len(given) > MOST_CHANGES or not all(isinstance(each, str) for each in given):
        raise bad_request("`changes` must be a list of at most {most} texts", most=MOST_CHANGES)
    changes = [each.strip() for each in given]
    for each in changes:
        if each.startswith("-") or "=" not in each:  # an option of the command is none
            hint = "write it as `key=value`, such as `steps=200`"
            raise bad_request("`{text}` does not change a key", hint, text=each[:80])
    return changes


def _key(override: str) -> Any:
    """Returns the path of an override's key; the text itself of another word."""
    try:
        return parse_key(override.partition("=")[0].strip())
    except UserError:
        return override
