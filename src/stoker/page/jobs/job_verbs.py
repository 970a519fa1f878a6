"""Runs verbs on a job: the one in a request, or that of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from stoker.page.access.guard import account_of
from stoker.page.access.job_paths import document_of, new_job_problems, path_problems, refuse
from stoker.page.jobs.job_check import problem_of, written_job
from stoker.page.page_error import PageError, passed_on
from stoker.page.request_values import as_word, text_of
from stoker.page.routing import Page
from stoker.page.run_data.run_view import read_job

AUDIT_SECONDS = 600.0  # for a verb that may have to tokenise the data first


def stage_words(values: Mapping[str, Any]) -> list[str]:
    """Returns the option of `stoker data` for the stage that a request names; none without one."""
    stage = text_of(values, "stage", default="", most=200)
    return ["--only", as_word("stage", stage)] if stage else []


@dataclass(frozen=True)
class JobVerbs:
    """Starts verbs over jobs and reads their JSON."""

    page: Page

    async def given(self, request: Request, body: dict[str, Any]) -> str:
        """Returns the job of a request's body, whose paths must be allowed for its author."""
        text = text_of(body, "yaml")
        document = await run_in_threadpool(document_of, text)
        account = account_of(request, "run")
        refuse(await run_in_threadpool(new_job_problems, document, self.page.settings, account))
        return text

    async def of_run(self, request: Request) -> str:
        """Returns the job of a run; code that it names is not run for being looked at."""
        folder = await run_in_threadpool(self.page.run_of, request)
        text = await run_in_threadpool(read_job, folder)
        document = await run_in_threadpool(document_of, text)
        refuse(await run_in_threadpool(path_problems, document, self.page.settings, None))
        return text

    async def answer(self, verb: str, text: str, options: Sequence[str], seconds: float) -> dict[str, Any]:
        """Returns the JSON of a verb over a job.

        Raises:
            PageError: the verb found the job wrong, with the place.
        """
        with written_job(self.page, text) as path:
            result = await self.page.verbs.run([verb, str(path), *options], seconds=seconds)
        answer = result.fields
        errors = [each for each in answer.get("errors", []) if isinstance(each, dict)]
        whole = {key: value for key, value in answer.items() if key not in ("ok", "errors")}
        if not whole:
            if errors:
                raise PageError(400, problem_of(errors[0], str(path)))
            raise passed_on(400, result.last_line.replace(str(path), "job.yaml"))
        text = json.dumps(answer).replace(json.dumps(str(path))[1:-1], "job.yaml")
        found: dict[str, Any] = json.loads(text)
        return found
