"""Routes of a ranking model's lookup: scores of typed rows, or of rows of the log that the run was trained on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.routing import Route

from stoker.data.files.rows import Raw
from stoker.data.ranking.log_rows import log_rows
from stoker.data.ranking.recorded_features import features_of_run
from stoker.data.sources import open_source
from stoker.errors import UserError
from stoker.job.load_job import load_job
from stoker.json_values import finite, map_leaves
from stoker.page.access.guard import account_of
from stoker.page.page_error import bad_request, not_found
from stoker.page.processes.chat_servers import ChatServers
from stoker.page.request_values import number_of, read_object, text_of
from stoker.page.routes.chat_routes import served_run
from stoker.page.routing import Page, in_thread, route
from stoker.runs.run_folder import RunFolder

MOST_ROWS = 1000  # of a request
LARGEST_EXACT = 2**53 - 1  # the largest integer that every JSON reader preserves
SHOWN = 100  # rows of a log in one answer


def lookup_routes(page: Page, servers: ChatServers) -> list[Route]:
    """Returns the routes of ranking models."""
    own = _LookupRoutes(page, servers)
    return [
        route("/api/score", own.score, method="POST", role="run"),
        route("/api/runs/{id}/log-rows", in_thread(own.rows)),
    ]


@dataclass(frozen=True)
class _LookupRoutes:
    page: Page
    servers: ChatServers

    async def score(self, request: Request) -> Any:
        """Returns the scores of rows, and which of their ids have no row in the tables."""
        body = await read_object(request)
        rows = body.get("rows")
        if not isinstance(rows, list) or not 0 < len(rows) <= MOST_ROWS or not all(isinstance(r, dict) for r in rows):
            raise bad_request("`rows` must be a list of 1 to {most} objects", '[{"user_id": 7, ...}]', most=MOST_ROWS)
        asked = await run_in_threadpool(served_run, self.page, text_of(body, "run", most=200))
        self.page.audit.write(account_of(request, "run").name, "score", run=str(asked.folder.path), rows=len(rows))
        return await self.servers.scores(asked.path, asked.name, rows, weights=asked.weights)

    def rows(self, request: Request) -> Any:
        """Rows of the log that a run was trained on, with the columns that its model reads."""
        query = request.query_params
        asked = served_run(self.page, request.path_params["id"])
        offset = number_of(query, "offset", default=0, most=1 << 40)
        limit = number_of(query, "limit", default=20, least=1, most=SHOWN)
        try:
            features = features_of_run(asked.folder)
        except UserError as error:
            raise not_found("the run has no features: it is not a ranking model, or did not start") from error
        found = list(islice(self._log(asked.folder), offset, offset + limit))
        columns = [{"name": column.name, "kind": column.kind} for column in features.columns if column.stored]
        rows = [{"row": each.row, "value": finite(exact_integers(each.value))} for each in found]
        return {"columns": columns, "labels": list(features.labels), "rows": rows}

    def _log(self, folder: RunFolder) -> Iterator[Raw]:
        base = self.page.settings.base
        for block in load_job(folder.job).job.data:
            for row in log_rows(open_source(block, base), block.format):
                if isinstance(row, Raw):
                    yield row


def exact_integers(value: Any) -> Any:
    """Converts integers that JavaScript would round to text; requests accept ids in either form."""
    return map_leaves(value, lambda leaf: str(leaf) if isinstance(leaf, int) and abs(leaf) > LARGEST_EXACT else leaf)
