"""Base of all routes: the parts of the page, and endpoints whose errors have the API's shape."""

from __future__ import annotations

import errno
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from stoker.errors import UserError
from stoker.json_values import finite
from stoker.page.access.accounts import Accounts
from stoker.page.access.audit_log import AuditLog
from stoker.page.access.guard import account_of, error_response
from stoker.page.access.job_paths import is_inside
from stoker.page.page_error import PageError, bad_request, http_error, of_user_error
from stoker.page.page_settings import PageSettings
from stoker.page.processes.detached_process import DetachedProcess
from stoker.page.processes.job_queue import JobQueue, QueuedJob
from stoker.page.processes.run_verb import Verbs
from stoker.page.processes.stop_requests import StopRequests
from stoker.page.run_data.run_index import RunIndex, id_of
from stoker.page.run_data.run_view import RunViews
from stoker.page.run_data.stage_views import job_folder
from stoker.runs.run_folder import RunFolder
from stoker.serve.guard import ClientLeft

Answer = Callable[[Request], Awaitable[Any]]
LEFT = 499  # the status that nginx records for a client that has left
PING = 15.0  # seconds between signs of life of a stream


@dataclass(frozen=True)
class Page:
    """The parts that routes work with."""

    settings: PageSettings
    accounts: Accounts
    audit: AuditLog
    runs: RunIndex
    views: RunViews
    queue: JobQueue
    stops: StopRequests
    verbs: Verbs

    def run_of(self, request: Request) -> RunFolder:
        """Returns the run whose id is in a request's path."""
        return self.runs.find(request.path_params["id"])

    def folder_of(self, key: str) -> RunFolder:
        """Returns the folder of the run with this id, or of the job in the queue that has no run itself.

        Raises:
            PageError: there is neither.
        """
        try:
            return self.runs.find(key)
        except PageError:
            for entry, _ in self.queued(key):
                if is_inside(Path(entry.run), self.settings.runs):
                    return RunFolder(Path(entry.run))
            raise

    def job_of(self, run: Path) -> tuple[QueuedJob, DetachedProcess] | None:
        """Returns the newest job of a run in the queue; of a stage's run that of all its stages."""
        job = job_folder(run)
        found = self.queue.of_run(job)
        return self.queue.of_run(run) if found is None and job != run else found

    def queued(self, key: str) -> list[tuple[QueuedJob, DetachedProcess]]:
        """Returns the jobs of the queue for the run with this id, the newest first."""
        return [each for each in reversed(self.queue.entries()) if id_of(Path(each[0].run)) == key]


def route(path: str, answer: Answer, *, method: str = "GET", role: str = "see") -> Route:
    """Returns a route whose answer is JSON or a custom response, for users with the rights of a role."""

    async def endpoint(request: Request) -> Response:
        try:
            if role:
                account_of(request, role)
            found = await answer(request)
        except PageError as error:
            return error_response(error)
        except UserError as error:
            return error_response(of_user_error(error))
        except (ClientDisconnect, ClientLeft):
            return Response(status_code=LEFT)
        except Exception as error:
            if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:  # only users choose names
                return error_response(bad_request("no file or folder can have so long a name", "write a shorter one"))
            # A bug: it is logged on the server, and the client gets no details.
            logging.getLogger("stoker.page").exception("%s %s", request.method, request.scope["path"])
            return error_response(http_error(500, "the page failed; its log has the reason"))
        return found if isinstance(found, Response) else json_response(found)

    return Route(path, endpoint, methods=[method])


def in_thread(answer: Callable[[Request], Any]) -> Answer:
    """Runs an answer that reads files in a thread."""

    async def threaded(request: Request) -> Any:
        return await run_in_threadpool(answer, request)

    return threaded


def json_response(value: Any) -> Response:
    """Returns a value as a JSON response; see `finite` for values without a JSON form."""
    try:
        return JSONResponse(value)
    except (TypeError, ValueError):
        return JSONResponse(finite(value))


def event(name: str, value: Any, number: str = "") -> bytes:
    """Returns a server-sent event."""
    head = f"id: {number}\n" if number else ""
    return f"{head}event: {name}\ndata: {json.dumps(finite(value), ensure_ascii=False)}\n\n".encode()


def stream(events: AsyncIterator[bytes]) -> Response:
    """Returns a response of server-sent events."""
    headers = {"cache-control": "no-cache, no-transform", "x-accel-buffering": "no"}
    return StreamingResponse(events, media_type="text/event-stream", headers=headers)
