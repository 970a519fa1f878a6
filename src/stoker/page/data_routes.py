"""Data: uploads and their versions, the audit of a job's data, its rows token by token, and its plan."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.routing import Route

from stoker.page.guard import account_of, number_of, read_object, text_of
from stoker.page.job_check import problem_of, written_job
from stoker.page.job_paths import document_of, is_inside, path_problems, refuse
from stoker.page.job_routes import shown
from stoker.page.page_error import PageError, wrong
from stoker.page.routing import Page, in_thread, route
from stoker.page.run_view import job_text
from stoker.page.settings import CHUNK
from stoker.page.uploads import LARGEST, MOST_ROWS, Uploads
from stoker.runs.plan_comparison import read_comparison

AUDIT_SECONDS, PLAN_SECONDS = 600.0, 300.0
CLUSTER = re.compile(r"(\d{1,4}x){1,2}[A-Za-z][\w.-]{0,40}")  # 4x8xH100
SHOWN_DROPPED = 1000
MOST_CHANGES = 100_000  # of a version


def data_routes(page: Page) -> list[Route]:
    """The routes of data and plans."""
    own = _DataRoutes(page, Uploads(page.settings.uploads))
    return [
        route("/api/uploads", own.begin, method="POST", role="run"),
        route("/api/uploads/{id}", own.append, method="PATCH", role="run"),
        route("/api/uploads/{id}", in_thread(own.upload)),
        route("/api/data", in_thread(own.all)),
        route("/api/data/{id}/rows", in_thread(own.file_rows)),
        route("/api/data/{id}/versions", own.version, method="POST", role="run"),
        route("/api/data/{id}", in_thread(own.put_aside), method="DELETE", role="run"),
        route("/api/removed-data", in_thread(own.removed)),
        route("/api/removed-data/{id}/restore", in_thread(own.restore), method="POST", role="run"),
        route("/api/removed-data/{id}", in_thread(own.delete), method="DELETE", role="run"),
        route("/api/audit", own.audit, method="POST", role="run"),
        route("/api/rows", own.rows, method="POST", role="run"),
        route("/api/plan", own.plan, method="POST", role="run"),
        route("/api/runs/{id}/audit", own.run_audit),
        route("/api/runs/{id}/rows", own.run_rows),
        route("/api/runs/{id}/plan", own.run_plan),
    ]


@dataclass(frozen=True)
class _DataRoutes:
    page: Page
    uploads: Uploads

    async def begin(self, request: Request) -> Any:
        """Makes room for a file, which comes in parts."""
        body = await read_object(request)
        name, size = text_of(body, "name", most=1000), number_of(body, "size", most=LARGEST)
        user = account_of(request, "run").name
        upload = await run_in_threadpool(self.uploads.begin, name, size, user)
        self.page.audit.write(user, "upload", id=upload.id, name=upload.name, size=size)
        return {"id": upload.id, "offset": 0, "chunk": CHUNK}

    async def append(self, request: Request) -> Any:
        """Adds a part to a file."""
        upload = await run_in_threadpool(self.uploads.find, request.path_params["id"])
        offset = number_of(request.query_params, "offset", most=LARGEST)
        await self.uploads.append(upload, offset, request.stream())
        return self.uploads.as_json(upload)

    def upload(self, request: Request) -> Any:
        """How much of a file has come."""
        return self.uploads.as_json(self.uploads.find(request.path_params["id"]))

    def all(self, _: Request) -> Any:
        """The uploaded files and their versions."""
        return {"data": [self.uploads.as_json(upload) for upload in self.uploads.all()]}

    def file_rows(self, request: Request) -> Any:
        """The rows of a file as they are written, after an offset or from the row of a number on."""
        query = request.query_params
        upload = self.uploads.find(request.path_params["id"])
        limit = number_of(query, "limit", default=50, least=1, most=MOST_ROWS)
        offset = number_of(query, "offset", default=0, most=1 << 40)
        return {"rows": self.uploads.rows(upload, offset, limit, number_of(query, "row", default=0, most=1 << 40))}

    async def version(self, request: Request) -> Any:
        """Makes a version of a file."""
        body = await read_object(request)
        exclude, edit = _parsed_changes(body)
        account = account_of(request, "run")
        upload = await run_in_threadpool(self.uploads.find, request.path_params["id"])
        made = await run_in_threadpool(self.uploads.version, upload, exclude, edit, account.name)
        self.page.audit.write(account.name, "version", id=made.id, of=upload.id, changes=dict(made.changes))
        return self.uploads.as_json(made)

    def put_aside(self, request: Request) -> Any:
        """Takes a file off the list."""
        upload = self.uploads.find(request.path_params["id"])
        command = self._line("mv", *self.uploads.put_aside(upload))
        self.page.audit.write(account_of(request, "run").name, "remove upload", command=command, id=upload.id)
        return {"command": command}

    def removed(self, _: Request) -> Any:
        """The files that were taken off the list."""
        keep = ("id", "name", "size", "time", "parent")
        return {
            "data": [
                {key: getattr(upload, key) for key in keep} | self._lines_of_removed(upload.id)
                for upload in self.uploads.removed()
            ]
        }

    def restore(self, request: Request) -> Any:
        """Puts a file back on the list."""
        key = request.path_params["id"]
        command = self._lines_of_removed(key)["restore"]
        self.page.audit.write(account_of(request, "run").name, "restore upload", command=command, id=key)
        return self.uploads.as_json(self.uploads.restore(key))

    def delete(self, request: Request) -> Any:
        """Deletes a removed file for good."""
        key = request.path_params["id"]
        command = self._lines_of_removed(key)["delete"]
        self.page.audit.write(account_of(request, "run").name, "delete upload", command=command, id=key)
        self.uploads.delete(key)
        return {"command": command}

    def _lines_of_removed(self, key: str) -> dict[str, str]:
        """The lines that restore a removed file, and that delete it for good."""
        places = self.uploads.places_of_removed(key)
        return {
            "restore": self._line("mv", places[-1], self.page.settings.uploads / key),
            "delete": self._line("rm", "-r", *places),
        }

    def _line(self, *words: str | Path) -> str:
        base = self.page.settings.base
        return shlex.join(shown(word, base) if isinstance(word, Path) else word for word in words)

    async def audit(self, request: Request) -> Any:
        """What `stoker data` says of a job."""
        return await self._audit(await self._job(request))

    async def rows(self, request: Request) -> Any:
        """Sequences of a job, token by token."""
        body = await read_object(request)
        return await self._rows(await self._job(request, body), body)

    async def plan(self, request: Request) -> Any:
        """What `stoker plan` says of a job, here or on other devices."""
        body = await read_object(request)
        on = text_of(body, "on", default="", most=200) or text_of(body, "devices", default="", most=200)
        return await self._plan(await self._job(request, body), on)

    async def run_audit(self, request: Request) -> Any:
        """The audit of the data that a run trains on, as it is now."""
        return await self._audit(await self._job_of_run(request))

    async def run_rows(self, request: Request) -> Any:
        """Sequences that a run trains on."""
        return await self._rows(await self._job_of_run(request), request.query_params)

    async def run_plan(self, request: Request) -> Any:
        """The plan of a run's job, and what was predicted and measured when it ran."""
        folder = await run_in_threadpool(self.page.runs.find, request.path_params["id"])
        text = await self._job_of_run(request)
        comparison = await run_in_threadpool(read_comparison, folder)
        found = await self._plan(text, request.query_params.get("on", "")[:200])
        return found | {"comparison": comparison and {"line": comparison.line()}}

    async def _job(self, request: Request, body: dict[str, Any] | None = None) -> str:
        """The job of a request's body, which may name only what its author may use."""
        text = text_of(body if body is not None else await read_object(request), "yaml")
        document = await run_in_threadpool(document_of, text)
        account = account_of(request, "run")
        refuse(await run_in_threadpool(path_problems, document, self.page.settings, account))
        return text

    async def _job_of_run(self, request: Request) -> str:
        """The job of a run; code that it names is not run for being looked at."""
        folder = await run_in_threadpool(self.page.runs.find, request.path_params["id"])
        text = await run_in_threadpool(job_text, folder)
        document = await run_in_threadpool(document_of, text)
        refuse(await run_in_threadpool(path_problems, document, self.page.settings, None))
        return text

    async def _audit(self, text: str) -> Any:
        found = await self._verb(["data"], text, ["--json", "--samples", "3"], AUDIT_SECONDS)
        if isinstance(found.get("dropped"), list):
            found["dropped"] = found["dropped"][:SHOWN_DROPPED]
        return found | {"samples": _sequences(found), "command": "stoker data job.yaml"}

    async def _rows(self, text: str, values: Any) -> Any:
        offset = number_of(values, "offset", default=0, most=1 << 40)
        limit = number_of(values, "limit", default=50, least=1, most=MOST_ROWS)
        window = ["--json", "--samples", str(limit), "--offset", str(offset)]
        found = await self._verb(["data"], text, window, AUDIT_SECONDS)
        command = f"stoker data job.yaml --samples {limit} --offset {offset}"
        return {"total": found.get("sequences", 0), "rows": _sequences(found), "command": command}

    async def _plan(self, text: str, on: str) -> Any:
        options = ["--json"]
        if on:
            cluster = self.page.settings.base / on
            if not CLUSTER.fullmatch(on) and on != "local" and not is_inside(cluster, self.page.settings.data):
                raise wrong(f"{on[:60]!r} is no cluster", "write it as 8xH100, 4x8xH100 or local")
            options += ["--on", on]
        result = await self._verb(["plan"], text, options, PLAN_SECONDS)
        return result | {"command": f"stoker plan job.yaml{f' --on {on}' if on else ''}"}

    async def _verb(self, verb: list[str], text: str, options: list[str], seconds: float) -> dict[str, Any]:
        """The JSON of a verb over a job.

        Raises:
            PageError: the verb found the job wrong, with the place.
        """
        with written_job(self.page, text) as path:
            result = await self.page.verbs.run([*verb, str(path), *options], seconds=seconds)
        answer = result.answer if isinstance(result.answer, dict) else {}
        errors = [each for each in answer.get("errors", []) if isinstance(each, dict)]
        whole = {key: value for key, value in answer.items() if key not in ("ok", "errors")}
        if not whole:
            if errors:
                raise PageError(400, problem_of(errors[0], str(path)))
            line = next((line for line in reversed(result.errors.splitlines()) if line.strip()), "it says nothing")
            raise PageError(400, line.replace(str(path), "job.yaml").removeprefix("error: ")[:500])
        text = json.dumps(answer).replace(json.dumps(str(path))[1:-1], "job.yaml")
        found: dict[str, Any] = json.loads(text)
        return found


def _sequences(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Samples of the audit with a token an object."""
    return [
        {
            "source": sample["source"],
            "row": sample["row"],
            "verdict": sample["verdict"],
            "tokens": [
                {"id": number, "text": text, "trained": trained, "special": special}
                for number, text, trained, special in zip(
                    sample["ids"], sample["tokens"], sample["trained"], sample["special"], strict=True
                )
            ],
        }
        for sample in found.get("samples", [])
        if isinstance(sample, dict) and "ids" in sample
    ]


def _parsed_changes(body: dict[str, Any]) -> tuple[set[int], dict[int, Any]]:
    """The rows to leave out, and those with other values.

    Raises:
        PageError: a row is no number, or a value is no row.
    """
    exclude, edit = body.get("exclude", []), body.get("edit", {})
    if not isinstance(exclude, list) or not isinstance(edit, dict) or len(exclude) + len(edit) > MOST_CHANGES:
        raise wrong("`exclude` is a list of rows, `edit` an object of row: value")
    if not all(isinstance(row, int) and not isinstance(row, bool) for row in exclude):
        raise wrong("`exclude` holds something that is no number of a row")
    if not all(row.isdecimal() and len(row) < 12 and isinstance(value, dict | str) for row, value in edit.items()):
        raise wrong("`edit` has to be an object of row: value")
    if not exclude and not edit:
        raise wrong("nothing would change", "give `exclude` or `edit`")
    return set(exclude), {int(row): value for row, value in edit.items()}
