"""The page as an ASGI application."""

from __future__ import annotations

from pathlib import Path

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from stoker.page.access.accounts import Accounts
from stoker.page.access.audit_log import AuditLog
from stoker.page.access.guard import PageGuard, error_response
from stoker.page.page_error import not_found
from stoker.page.page_settings import PageSettings
from stoker.page.processes.chat_servers import ChatServers
from stoker.page.processes.job_queue import JobQueue
from stoker.page.processes.run_verb import Verbs
from stoker.page.processes.stop_requests import StopRequests
from stoker.page.routes.account_routes import account_routes
from stoker.page.routes.action_routes import action_routes
from stoker.page.routes.chat_routes import chat_routes
from stoker.page.routes.data_routes import data_routes
from stoker.page.routes.edit_routes import edit_routes
from stoker.page.routes.import_routes import import_routes
from stoker.page.routes.job_routes import job_routes
from stoker.page.routes.lookup_routes import lookup_routes
from stoker.page.routes.resume_routes import resume_routes
from stoker.page.routes.row_routes import row_routes
from stoker.page.routes.run_routes import run_routes
from stoker.page.routes.run_stream import run_stream_routes
from stoker.page.routes.run_tools_routes import run_tools_routes
from stoker.page.routes.server_routes import server_routes
from stoker.page.routing import Page
from stoker.page.run_data.metric_series import SeriesCache
from stoker.page.run_data.run_index import RunIndex
from stoker.page.run_data.run_view import RunViews

STATIC = Path(__file__).parent / "static"
LEAST_COMPRESSED = 1000  # bytes
COMPRESSION = 4  # a third of the time of level 9, for a few percent more bytes


def page_of(settings: PageSettings) -> Page:
    """Returns the parts of a page."""
    queue = JobQueue(settings.state)
    return Page(
        settings=settings,
        accounts=Accounts(settings),
        audit=AuditLog(settings.state),
        runs=RunIndex(settings.runs),
        views=RunViews(SeriesCache(settings.state / "metrics")),
        queue=queue,
        stops=StopRequests(settings.state, queue),
        verbs=Verbs(settings.base),
    )


def application(page: Page) -> ASGIApp:
    """Returns the application: the API, and the files of the page."""
    servers = ChatServers(page.settings.base, page.settings.state)
    routes = [
        *account_routes(page),
        *run_routes(page),
        *run_stream_routes(page),
        *job_routes(page),
        *resume_routes(page),
        *data_routes(page),
        *row_routes(page),
        *edit_routes(),
        *chat_routes(page, servers),
        *lookup_routes(page, servers),
        *server_routes(page),
        *action_routes(page),
        *run_tools_routes(page),
        *import_routes(page),
        Route("/api/{rest:path}", _no_such_path, methods=["GET", "POST", "PATCH", "PUT", "DELETE", "HEAD"]),
        Mount("/static", StaticFiles(directory=STATIC)),
        Route("/", _index),
        Route("/index.html", _index),
    ]
    app = Starlette(
        routes=routes, middleware=[Middleware(GZipMiddleware, minimum_size=LEAST_COMPRESSED, compresslevel=COMPRESSION)]
    )
    app.state.accounts = page.accounts
    return PageGuard(app, page.settings, page.accounts)  # outermost: its headers are also on error responses


async def _no_such_path(_: Request) -> Response:
    return error_response(not_found("the API has no such path, or not with this method", "see docs/page-api.md"))


async def _index(_: Request) -> Response:
    """Returns the page; the addresses of its views are behind ``#``."""
    return FileResponse(STATIC / "index.html")
