"""The route that streams the updates of a run as server-sent events."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from stoker.errors import UserError
from stoker.files import no_link
from stoker.json_values import json_or_none
from stoker.page.access.guard import cookie_name
from stoker.page.routing import PING, Page, event, route, stream
from stoker.page.run_data.queued_runs import with_status
from stoker.page.run_data.run_index import is_run_file
from stoker.page.run_data.run_view import short_event
from stoker.runs.line_batches import line_batches
from stoker.runs.run_folder import RunFolder

POLL = 1.0  # seconds between two looks of a stream
LOOK_EVERY = 2.0  # seconds between two checks of the status if no file has changed
SESSION_EVERY = 5.0  # seconds between a stream's checks of its session
BATCH = 500  # lines in one event of a stream
NEWS_BYTES = 16 << 20  # of a file that are read at a time
_RESUME = re.compile(r"(\d{1,18})-(\d{1,18})")


def run_stream_routes(page: Page) -> list[Route]:
    """Returns the route of the stream."""
    return [route("/api/runs/{id}/stream", RunStream(page).stream)]


@dataclass(frozen=True)
class RunStream:
    """Streams of the page's runs."""

    page: Page

    async def stream(self, request: Request) -> Response:
        """Streams updates of a run, as server-sent events."""
        folder = await run_in_threadpool(self.page.run_of, request)
        last = request.headers.get("last-event-id") or request.query_params.get("last", "")
        known = _RESUME.fullmatch(last)
        position = (int(known[1]), int(known[2])) if known else _sizes(folder)
        return stream(self.while_admitted(request, self._news(folder, *position)))

    async def while_admitted(self, request: Request, parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yields the parts of a stream until its session has ended."""
        settings, accounts, checked = self.page.settings, self.page.accounts, time.monotonic()
        cookie = request.cookies.get(cookie_name(settings), "")
        async for part in parts:
            if settings.demands_login and time.monotonic() - checked >= SESSION_EVERY:
                try:
                    if accounts.session_of(cookie) is None:
                        return
                except UserError:  # the file of users is invalid
                    return
                checked = time.monotonic()
            yield part

    async def _news(self, folder: RunFolder, metrics: int, events: int) -> AsyncIterator[bytes]:
        status, quiet, looked, number = "", 0.0, 0.0, _inode(folder.metrics)
        while True:
            sizes, before, number = _sizes(folder), number, _inode(folder.metrics)
            if sizes[0] < metrics or sizes[1] < events or (before and number != before):
                metrics, events = sizes  # training went back to an earlier step
                yield event("reset", {}, f"{metrics}-{events}")
            lines, metrics = await run_in_threadpool(new_lines, folder.metrics, metrics)
            for begin in range(0, len(lines), BATCH):
                yield event("metrics", lines[begin : begin + BATCH], f"{metrics}-{events}")
            more, events = await run_in_threadpool(new_lines, folder.events, events)
            for each in more:
                yield event("event", short_event(each), f"{metrics}-{events}")
            if lines or more or looked <= 0:
                summary = await run_in_threadpool(lambda: with_status(self.page, self.page.views.summary(folder)))
                looked = LOOK_EVERY
                if summary["status"] != status or lines or more:
                    yield event("status", summary, f"{metrics}-{events}")
                    status, quiet = summary["status"], 0.0
            if quiet >= PING:
                yield b": here\n\n"
                quiet = 0.0
            quiet, looked = quiet + POLL, looked - POLL
            await asyncio.sleep(POLL)


def size_of(path: Path) -> int:
    """Returns the bytes of a run's file; 0 if it is missing."""
    return path.stat().st_size if is_run_file(path) else 0


def _sizes(folder: RunFolder) -> tuple[int, int]:
    return size_of(folder.metrics), size_of(folder.events)


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return 0


def new_lines(path: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """Returns the complete lines of a file from a byte offset, and the offset of the next."""
    if not is_run_file(path):
        return [], offset
    found, end = [], offset
    with open(path, "rb", opener=no_link) as file:
        file.seek(offset)
        for lines, end in line_batches(file):
            found += [value for line in lines if isinstance(value := json_or_none(line), dict)]
            if end > offset + NEWS_BYTES:
                break
    return found, end
