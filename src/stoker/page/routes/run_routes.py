"""Routes of runs: lists, curves, events and logs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.routing import Route

from stoker.files import no_link
from stoker.page.access.mask_secrets import masked_part
from stoker.page.page_error import PageError, bad_request, not_found
from stoker.page.request_values import number_of
from stoker.page.routes.run_stream import size_of
from stoker.page.routing import Page, in_thread, route
from stoker.page.run_data.metric_series import AXES, Axis
from stoker.page.run_data.queued_runs import all_runs, job_detail, with_status
from stoker.page.run_data.run_index import id_of, is_run_file

POINTS = 800
MOST_POINTS = 5_000
MOST_KEYS = 64
LOG_BYTES = 256 << 10
ERROR_BYTES = 16 << 10  # of the end of what a command wrote to stderr
_LOG = re.compile(r"rank-(\d{1,6})\.log")


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
    ]


@dataclass(frozen=True)
class _RunRoutes:
    page: Page

    def list(self, _: Request) -> Any:
        """Returns all runs, and jobs without a run yet."""
        return {"runs": all_runs(self.page)}

    def detail(self, request: Request) -> Any:
        """Returns a run, or a job that has none yet."""
        try:
            return with_status(self.page, self.page.views.detail(self.page.run_of(request)))
        except PageError as error:
            jobs = (job_detail(self.page, *each) for each in self.page.queued(request.path_params["id"]))
            found = next((job for job in jobs if job is not None), None)
            if found is None:
                raise error
            return found

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
        return {**found, "keys": series.keys(), "cursor": f"{series.offset}-{size_of(folder.events)}"}

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
