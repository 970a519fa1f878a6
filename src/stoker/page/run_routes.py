"""Routes of runs: lists, curves, events, logs, and a stream of updates."""

from __future__ import annotations

import asyncio
import os
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
from stoker.page.detached_process import DetachedProcess
from stoker.page.guard import cookie_name
from stoker.page.job_paths import is_inside
from stoker.page.job_queue import ALIVE, QueuedJob
from stoker.page.mask_secrets import mask_secrets, masked_part
from stoker.page.metric_series import AXES, Axis
from stoker.page.page_error import PageError, bad_request, not_found
from stoker.page.removed_runs import removed_runs
from stoker.page.request_values import number_of
from stoker.page.routing import PING, Page, event, in_thread, route, stream
from stoker.page.run_health import KILLED
from stoker.page.run_index import id_of, is_run_file
from stoker.page.run_view import short_event
from stoker.page.stage_views import WAITING, stages_below
from stoker.runs.line_batches import line_batches
from stoker.runs.run_folder import RunFolder

POINTS = 800
MOST_POINTS = 5_000
MOST_KEYS = 64
LOG_BYTES = 256 << 10
ERROR_BYTES = 16 << 10  # of the end of what a command wrote to stderr
POLL = 1.0  # seconds between two looks of a stream
LOOK_EVERY = 2.0  # seconds between two checks of the status if no file has changed
SESSION_EVERY = 5.0  # seconds between a stream's checks of its session
BATCH = 500  # lines in one event of a stream
NEWS_BYTES = 16 << 20  # of a file that are read at a time
_LOG = re.compile(r"rank-(\d{1,6})\.log")
_RESUME = re.compile(r"(\d{1,18})-(\d{1,18})")


def run_routes(page: Page) -> list[Route]:
    """Returns the routes of runs."""
    own = _RunRoutes(page)
    return [
        route("/api/runs", in_thread(own.list)),
        route("/api/runs/{id}", in_thread(own.detail)),
        route("/api/runs/{id}/metrics", in_thread(own.metrics)),
        route("/api/runs/{id}/events", in_thread(own.events)),
        route("/api/runs/{id}/samples", in_thread(own.samples)),
        route("/api/runs/{id}/log", in_thread(own.log)),
        route("/api/runs/{id}/stream", own.stream),
    ]


@dataclass(frozen=True)
class _RunRoutes:
    page: Page

    def list(self, _: Request) -> Any:
        """Returns all runs, and jobs without a run yet: those that train by their start, then the newest first."""
        runs = {key: self.page.views.summary(folder) for key, folder in self.page.runs.all().items()}
        for entry, process in self.page.queue.entries():
            key = id_of(Path(entry.run))
            if key in runs:
                runs[key]["status"] = _status(runs[key], process)
            elif not _has_stages(entry, runs) and self._is_shown(entry, process):
                runs[key] = _without_run(entry, process)
        return {"runs": sorted(runs.values(), key=_place)}

    def detail(self, request: Request) -> Any:
        """Returns a run, or a job that has none yet."""
        try:
            return self._with_status(self.page.views.detail(self.page.run_of(request)))
        except PageError as error:
            jobs = (self._job_detail(*each) for each in self.page.queued(request.path_params["id"]))
            found = next((job for job in jobs if job is not None), None)
            if found is None:
                raise error
            return found

    def _job_detail(self, entry: QueuedJob, process: DetachedProcess) -> dict[str, Any] | None:
        """Returns a job without a run of its own, which may have stages; None if it is not shown."""
        run, job = Path(entry.run), Path(entry.job)
        stages = stages_below(run, self.page.views.events) if is_inside(run, self.page.settings.runs) else []
        has_begun = any(stage["status"] != WAITING for stage in stages)
        if not has_begun and not self._is_shown(entry, process):
            return None
        found = _without_run(entry, process) | (_progress(stages, process) if has_begun else {})
        return {
            **found,
            **self._queue(entry, found["status"]),
            "job": mask_secrets(job.read_text(encoding="utf-8") if is_run_file(job) else ""),
            "command": entry.command,
            "stages": stages,
            "stopping": self.page.stops.has(run),
            "health": [],
            "lineage": None,
            "metrics": [],
        }

    def _is_shown(self, entry: QueuedJob, process: DetachedProcess) -> bool:
        """Returns whether a job without a run is shown: it waits, starts or failed, and its run was not removed."""
        run, roots = Path(entry.run), self.page.settings.runs
        if not is_inside(run, roots):  # another page with the same folder of state started it
            return False
        if process.state in ALIVE:
            return True
        return process.code != 0 and not any(
            gone.origin.is_relative_to(run) and gone.time > entry.time for gone in removed_runs(roots)
        )

    def _with_status(self, summary: dict[str, Any]) -> dict[str, Any]:
        """Returns a run whose job may wait, may be starting again, or was asked to stop."""
        run = Path(summary["folder"])
        queued = self.page.queue.of_run(run)
        status = summary["status"] if queued is None else _status(summary, queued[1])
        if status in ("queued", "starting") and "health" in summary:  # it goes on by itself
            summary = summary | {"health": [each for each in summary["health"] if each["key"] != KILLED]}
        place = {} if queued is None else self._queue(queued[0], status)
        return summary | {"status": status, "stopping": self.page.stops.has(run)} | place

    def _queue(self, entry: QueuedJob, status: str) -> dict[str, Any]:
        """Returns {queue} of a job that waits: its place, and the names of the jobs that it begins after."""
        if status != "queued":
            return {}
        states = [(each, process.state) for each, process in self.page.queue.entries() if each.number < entry.number]
        before = [(each, state) for each, state in states if state in ALIVE]
        place = 1 + sum(state == "waiting" for _, state in before)
        return {"queue": {"place": place, "after": [each.name for each, _ in before]}}

    def metrics(self, request: Request) -> Any:
        """Curves of some keys in a window, in buckets."""
        query = request.query_params
        axis = query.get("axis", "step")
        if axis not in AXES:
            raise bad_request("`{key}` must be one of {known}", key="axis", known=", ".join(AXES))
        points = number_of(query, "points", default=POINTS, least=1, most=MOST_POINTS)
        folder = self.page.run_of(request)
        series = self.page.views.series.of(folder.metrics)
        keys = query.getlist("key") or series.keys()[:MOST_KEYS]
        if len(keys) > MOST_KEYS:
            raise bad_request(
                "`{key}` is given {n} times", "request at most {most}", key="key", n=len(keys), most=MOST_KEYS
            )
        own_axis: Axis = axis  # type: ignore[assignment]
        window = _bound(query, "from"), _bound(query, "to")
        found = series.curve(keys, axis=own_axis, begin=window[0], end=window[1], points=points).as_json()
        return {**found, "keys": series.keys(), "cursor": f"{series.offset}-{_sizes(folder)[1]}"}

    def events(self, request: Request) -> Any:
        """Returns the events of a run, without long tables, which have separate routes."""
        return {"events": self.page.views.short_events(self.page.run_of(request))}

    def samples(self, request: Request) -> Any:
        """Returns the answers to held-out prompts, at each step at which there are some."""
        return {"samples": self.page.views.samples(self.page.run_of(request))}

    def log(self, request: Request) -> Any:
        """Returns a part of a rank's log; without a rank, of the output of the command that started the run."""
        query, settings = request.query_params, self.page.settings
        offset = number_of(query, "offset", default=-LOG_BYTES, least=-(1 << 62))
        key = request.path_params["id"]
        if "rank" not in query:
            queued = [(e, p) for e, p in self.page.queue.entries() if id_of(Path(e.run)) == key]
            if queued:
                out, err = (queued[-1][1].folder / name for name in ("out", "err"))
                text, end = _part(out, offset)
                errors, _ = _part(err, -ERROR_BYTES)
                line = settings.line("cat", out, err)
                ranks = _ranks(Path(queued[-1][0].run))
                return {"text": text, "offset": end, "errors": errors, "ranks": ranks, "command": line}
        rank = number_of(query, "rank", default=0, most=1 << 20)
        folder = self.page.run_of(request)
        path = folder.path / "logs" / f"rank-{rank}.log"
        if not is_run_file(path) or path.parent.is_symlink():
            raise not_found("there is no log of rank {rank}", "ranks begin at 0", rank=rank)
        text, end = _part(path, offset)
        line = settings.line("stoker", "logs", folder.path, "--rank", str(rank))
        return {"text": text, "offset": end, "ranks": _ranks(folder.path), "command": line}

    async def stream(self, request: Request) -> Response:
        """Streams updates of a run, as server-sent events."""
        folder = await run_in_threadpool(self.page.run_of, request)
        last = request.headers.get("last-event-id") or request.query_params.get("last", "")
        known = _RESUME.fullmatch(last)
        position = (int(known[1]), int(known[2])) if known else _sizes(folder)
        return stream(self._while_admitted(request, self._news(folder, *position)))

    async def _while_admitted(self, request: Request, parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
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
            lines, metrics = await run_in_threadpool(_new_lines, folder.metrics, metrics)
            for begin in range(0, len(lines), BATCH):
                yield event("metrics", lines[begin : begin + BATCH], f"{metrics}-{events}")
            more, events = await run_in_threadpool(_new_lines, folder.events, events)
            for each in more:
                yield event("event", short_event(each), f"{metrics}-{events}")
            if lines or more or looked <= 0:
                summary = await run_in_threadpool(lambda: self._with_status(self.page.views.summary(folder)))
                looked = LOOK_EVERY
                if summary["status"] != status or lines or more:
                    yield event("status", summary, f"{metrics}-{events}")
                    status, quiet = summary["status"], 0.0
            if quiet >= PING:
                yield b": here\n\n"
                quiet = 0.0
            quiet, looked = quiet + POLL, looked - POLL
            await asyncio.sleep(POLL)


def _place(run: dict[str, Any]) -> tuple[bool, float]:
    """Returns the place of a run in the list; runs that train do not change theirs with each step."""
    is_running = run["status"] == "running"
    return not is_running, -((run["started"] if is_running else run["updated"]) or 0.0)


def _status(summary: dict[str, Any], process: DetachedProcess) -> str:
    """Returns the status of a run whose process is queued, or has begun and not written anything yet."""
    status, state = str(summary["status"]), process.state
    if state == "waiting":
        return "queued"
    begun = process.times()[0] or 0.0
    if state in ("starting", "running") and status != "running" and begun > (summary["updated"] or 0.0):
        return "starting"
    return status


def _has_stages(entry: QueuedJob, runs: dict[str, dict[str, Any]]) -> bool:
    """Returns whether some runs are those of the stages of a job."""
    return any(run["folder"].startswith(entry.run + os.sep) for run in runs.values())


def _without_run(entry: QueuedJob, process: DetachedProcess) -> dict[str, Any]:
    """Returns the summary of a job whose run has not begun."""
    state = process.state
    words = {"waiting": "queued", "starting": "starting", "running": "starting", "ended": "failed", "lost": "failed"}
    begun, ended = process.times()
    return {
        "id": id_of(Path(entry.run)),
        "name": entry.name,
        "folder": entry.run,
        "status": "done" if process.code == 0 else words[state],
        "task": "",
        "model": "",
        "step": 0,
        "steps": 0,
        "saved": None,
        "loss": None,
        "held_out_loss": None,
        "seconds_left": None,
        "started": begun,
        "updated": ended or begun or entry.time,
        "parents": [],
        "number": entry.number,
        "error": mask_secrets(process.output("err", offset=-1, most=4000)[0]) if process.code else "",
    }


def _progress(stages: list[dict[str, Any]], process: DetachedProcess) -> dict[str, Any]:
    """Returns the status of a job with stages of which some have begun, and how many are done."""
    found = [stage["status"] for stage in stages]
    if process.state in ALIVE or "running" in found:  # a job may also go on in a terminal
        status = "running"
    elif process.code == 0 or set(found) == {"done"}:
        status = "done"
    elif "stopped" in found and "failed" not in found:
        status = "stopped"
    else:
        status = "interrupted" if process.state == "lost" and "failed" not in found else "failed"
    error = {} if status == "failed" else {"error": ""}
    return {"status": status, "step": found.count("done"), "steps": len(found), **error}


def _part(path: Path, offset: int) -> tuple[str, int]:
    """Returns lines of a log from a byte offset, and the offset of the next; none if the file is missing."""
    try:
        with open(path, "rb", opener=no_link) as file:
            return masked_part(file, offset, LOG_BYTES)
    except OSError:
        return "", 0


def _ranks(folder: Path) -> list[int]:
    logs = folder / "logs"
    if logs.is_symlink() or not logs.is_dir():
        return []
    return sorted(int(found[1]) for path in logs.iterdir() if (found := _LOG.fullmatch(path.name)))


def _bound(query: Any, key: str) -> float | None:
    text = query.get(key, "")
    if not text:
        return None
    try:
        return float(text[:40])
    except ValueError:
        raise bad_request("`{key}` must be a number", key=key) from None


def _sizes(folder: RunFolder) -> tuple[int, int]:
    return tuple(path.stat().st_size if is_run_file(path) else 0 for path in (folder.metrics, folder.events))  # type: ignore[return-value]


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return 0


def _new_lines(path: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
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
