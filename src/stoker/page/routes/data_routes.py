"""Routes of data: uploads and their versions, the audit of a job's data, and its plan."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.routing import Route

from stoker.data.files.readers import decode
from stoker.data.files.rows import Raw, Rejected
from stoker.job.load_job import STAGES, check_document
from stoker.page.access.guard import account_of
from stoker.page.access.job_paths import document_of, is_inside
from stoker.page.access.named_in_job import sound_job
from stoker.page.data_files.column_roles import column_roles
from stoker.page.data_files.file_reads import FileReads
from stoker.page.data_files.first_rows import first_rows
from stoker.page.data_files.uploads import LARGEST, MOST_ROWS, Uploads
from stoker.page.jobs.job_verbs import AUDIT_SECONDS, JobVerbs, stage_words
from stoker.page.page_error import bad_request
from stoker.page.page_settings import CHUNK
from stoker.page.request_values import number_of, read_object, text_of
from stoker.page.routing import Page, in_thread, route
from stoker.page.run_data.answer_views import rows_of
from stoker.runs.plan_record import read_comparison

PLAN_SECONDS = 300.0
ROW_SECONDS = 60.0  # for rows of a file, which may have to be unpacked up to them
CLUSTER = re.compile(r"(\d{1,4}x){1,2}[A-Za-z][\w.-]{0,40}")  # 4x8xH100
SHOWN_DROPPED = 1000
MOST_CHANGES = 100_000  # of a version


def data_routes(page: Page) -> list[Route]:
    """Returns the routes of data and plans."""
    own = _DataRoutes(page, Uploads(page.settings.uploads), JobVerbs(page), FileReads())
    return [
        route("/api/uploads", own.begin, method="POST", role="run"),
        route("/api/uploads/{id}", own.append, method="PATCH", role="run"),
        route("/api/uploads/{id}", in_thread(own.upload)),
        route("/api/data", in_thread(own.all)),
        route("/api/data/{id}/rows", own.file_rows),
        route("/api/data/{id}/format", own.format),
        route("/api/data/{id}/versions", own.version, method="POST", role="run"),
        route("/api/data/{id}", in_thread(own.put_aside), method="DELETE", role="run"),
        route("/api/removed-data", in_thread(own.removed)),
        route("/api/removed-data/{id}/restore", in_thread(own.restore), method="POST", role="run"),
        route("/api/removed-data/{id}", in_thread(own.delete), method="DELETE", role="run"),
        route("/api/columns", own.columns, method="POST", role="run"),
        route("/api/audit", own.audit, method="POST", role="run"),
        route("/api/plan", own.plan, method="POST", role="run"),
        route("/api/runs/{id}/audit", own.run_audit),
        route("/api/runs/{id}/plan", own.run_plan),
    ]


@dataclass(frozen=True)
class _DataRoutes:
    page: Page
    uploads: Uploads
    jobs: JobVerbs
    reads: FileReads

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
        """Returns how much of a file has been uploaded."""
        return self.uploads.as_json(self.uploads.find(request.path_params["id"]))

    def all(self, _: Request) -> Any:
        """Returns the uploaded files and their versions."""
        return {"data": [self.uploads.as_json(upload) for upload in self.uploads.all()]}

    async def file_rows(self, request: Request) -> Any:
        """Returns the unparsed rows of a file, after an offset or from a row number on."""
        query = request.query_params
        upload = await run_in_threadpool(self.uploads.find, request.path_params["id"])
        limit = number_of(query, "limit", default=50, least=1, most=MOST_ROWS)
        offset = number_of(query, "offset", default=0, most=1 << 40)
        row = number_of(query, "row", default=0, most=1 << 40)
        rows = await self.reads.run(
            request, lambda check: self.uploads.rows(upload, offset, limit, row, check=check), seconds=ROW_SECONDS
        )
        return {"rows": rows}

    async def format(self, request: Request) -> Any:
        """Returns the columns and the format of a file's first rows; see `first_rows`."""
        path = self.uploads.path(await run_in_threadpool(self.uploads.find, request.path_params["id"]))
        return await self.reads.run(request, lambda check: first_rows(path, check), seconds=ROW_SECONDS)

    async def version(self, request: Request) -> Any:
        """Makes a version of a file."""
        body = await read_object(request)
        exclude, edit = _parsed_changes(body)
        account = account_of(request, "run")
        upload = await run_in_threadpool(self.uploads.find, request.path_params["id"])
        made = await self.reads.run(
            request,
            lambda check: self.uploads.version(upload, exclude, edit, account.name, check=check),
            seconds=AUDIT_SECONDS,
        )
        self.page.audit.write(account.name, "version", id=made.id, of=upload.id, changes=dict(made.changes))
        return self.uploads.as_json(made)

    def put_aside(self, request: Request) -> Any:
        """Takes a file off the list."""
        upload = self.uploads.find(request.path_params["id"])
        place, aside = self.uploads.places_aside(upload)
        command = self.page.settings.line("mv", place, aside)
        self.page.audit.write(account_of(request, "run").name, "remove upload", command=command, id=upload.id)
        place.rename(aside)
        return {"command": command}

    def removed(self, _: Request) -> Any:
        """Returns the files that were taken off the list."""
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
        return self.uploads.as_json(self.uploads.restore(key)) | {"command": command}

    def delete(self, request: Request) -> Any:
        """Deletes a removed file for good."""
        key = request.path_params["id"]
        command = self._lines_of_removed(key)["delete"]
        self.page.audit.write(account_of(request, "run").name, "delete upload", command=command, id=key)
        self.uploads.delete(key)
        return {"command": command}

    def _lines_of_removed(self, key: str) -> dict[str, str]:
        """Returns the lines that restore a removed file, and that delete it for good."""
        places = self.uploads.places_of_removed(key)
        return {
            "restore": self.page.settings.line("mv", places[-1], self.page.settings.uploads / key),
            "delete": self.page.settings.line("rm", "-r", *places),
        }

    async def columns(self, request: Request) -> Any:
        """Returns what the columns of a job's data are taken as; see `column_roles`."""
        document = document_of(await self.jobs.given(request, await read_object(request)))
        if STAGES in document.data:
            return {"sources": []}
        job, base = sound_job(lambda: check_document(document)).job, self.page.settings.base
        read = self.reads.run(request, lambda check: column_roles(job, base, check), seconds=ROW_SECONDS)
        return {"sources": await read}

    async def audit(self, request: Request) -> Any:
        """Returns the result of `stoker data` for a job."""
        body = await read_object(request)
        return await self._audit(await self.jobs.given(request, body), stage_words(body))

    async def plan(self, request: Request) -> Any:
        """Returns the result of `stoker plan` for a job, on this machine or on other devices."""
        body = await read_object(request)
        on = text_of(body, "on", default="", most=200) or text_of(body, "devices", default="", most=200)
        return await self._plan(await self.jobs.given(request, body), on)

    async def run_audit(self, request: Request) -> Any:
        """Returns the audit of the current state of a run's training data."""
        return await self._audit(await self.jobs.of_run(request), [])

    async def run_plan(self, request: Request) -> Any:
        """Returns the plan of a run's job, and the run's prediction and measurement."""
        folder = await run_in_threadpool(self.page.run_of, request)
        text = await self.jobs.of_run(request)
        comparison = await run_in_threadpool(read_comparison, folder)
        found = await self._plan(text, request.query_params.get("on", "")[:200])
        return found | {"comparison": comparison and {"line": comparison.line()}}

    async def _audit(self, text: str, stage: list[str]) -> Any:
        found = await self.jobs.answer("data", text, ["--json", "--samples", "3", *stage], AUDIT_SECONDS)
        if isinstance(found.get("dropped"), list):
            found["dropped"] = found["dropped"][:SHOWN_DROPPED]
        command = shlex.join(["stoker", "data", "job.yaml", *stage])
        return found | {"samples": rows_of(found.get("samples")), "command": command}

    async def _plan(self, text: str, on: str) -> Any:
        options = ["--json", "--cluster-only"]  # targets name files and commands of this machine
        if on:
            cluster = self.page.settings.base / on
            if not CLUSTER.fullmatch(on) and on != "local" and not is_inside(cluster, self.page.settings.data):
                raise bad_request("`{text}` is not a cluster", "write it as 8xH100, 4x8xH100 or local", text=on[:60])
        chosen = ["--on", on] if on else []
        result = await self.jobs.answer("plan", text, [*options, *chosen], PLAN_SECONDS)
        return result | {"command": shlex.join(["stoker", "plan", "job.yaml", *chosen])}


def _parsed_changes(body: dict[str, Any]) -> tuple[set[int], dict[int, Any]]:
    """Returns the rows to leave out, and those with other values.

    Raises:
        PageError: a row is not a number, or a value is neither a row nor the JSON of one.
    """
    exclude, edit = body.get("exclude", []), body.get("edit", {})
    if not isinstance(exclude, list) or not isinstance(edit, dict) or len(exclude) + len(edit) > MOST_CHANGES:
        raise bad_request("`exclude` is a list of rows, `edit` an object of row: value")
    if not all(isinstance(row, int) and not isinstance(row, bool) for row in exclude):
        raise bad_request("`exclude` contains a value that is not a row number")
    if not all(row.isdecimal() and len(row) < 12 and isinstance(value, dict | str) for row, value in edit.items()):
        raise bad_request("`edit` must be an object of row: value")
    if not exclude and not edit:
        raise bad_request("nothing would change", "give `exclude` or `edit`")
    return set(exclude), {int(row): _edited(int(row), value) for row, value in edit.items()}


def _edited(row: int, value: dict[str, Any] | str) -> Any:
    text = value if isinstance(value, str) else json.dumps(value)
    found = decode(Raw(".jsonl", row, text.encode("utf-8", "surrogatepass")))
    if isinstance(found, Rejected):
        raise bad_request("the new value of row {row} is not usable: {reason}", row=row, reason=found.reason)
    return found
