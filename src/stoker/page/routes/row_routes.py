"""Routes of a job's data rows, token by token: single rows, packed sequences of a run, and their losses."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.routing import Route

from stoker.job.load_job import load_job
from stoker.page.data_files.uploads import MOST_ROWS
from stoker.page.jobs.job_check import problem_of
from stoker.page.jobs.job_verbs import AUDIT_SECONDS, JobVerbs, stage_words
from stoker.page.page_error import PageError, passed_on
from stoker.page.request_values import as_word, flag_of, number_of, read_object, text_of
from stoker.page.routing import Page, route
from stoker.page.run_data.answer_views import rows_of, sequences_of
from stoker.runs.run_folder import RunFolder

MOST_MEASURED = 200  # sequences whose losses can be requested together


def row_routes(page: Page) -> list[Route]:
    """Returns the routes of rows."""
    own = _RowRoutes(page, JobVerbs(page))
    return [
        route("/api/rows", own.rows, method="POST", role="run"),
        route("/api/runs/{id}/rows", own.run_rows),
        route("/api/runs/{id}/token-losses", own.losses, method="POST", role="run"),
    ]


@dataclass(frozen=True)
class _RowRoutes:
    page: Page
    jobs: JobVerbs

    async def rows(self, request: Request) -> Any:
        """Sequences of a job, token by token."""
        body = await read_object(request)
        return await self._rows(await self.jobs.given(request, body), body)

    async def run_rows(self, request: Request) -> Any:
        """Sequences that a run trains on, and the checkpoints that their losses can be measured at."""
        found = await self._rows(await self.jobs.of_run(request), request.query_params)
        folder = await run_in_threadpool(self.page.run_of, request)
        return found | {"checkpoints": await run_in_threadpool(_checkpoints, folder, self.page.settings.base)}

    async def losses(self, request: Request) -> Any:
        """Returns the requested sequences with the loss of each trained token under a checkpoint of the run."""
        body = await read_object(request)
        begin, count, packed = _window(body, MOST_MEASURED)
        at = as_word("at", text_of(body, "at", default="last", most=40))
        await self.jobs.of_run(request)
        folder = await run_in_threadpool(self.page.run_of, request)
        words = ["eval", self.page.settings.shown(folder.path), "--by-token", str(count)]
        words += ["--offset", str(begin)] if begin else []
        words += ["--packed"] if packed else []
        words += ["--at", at] if at != "last" else []
        result = await self.page.verbs.run([*words, "--json"], seconds=AUDIT_SECONDS)
        if not (found := result.fields):
            raise passed_on(400, result.last_line)
        command = shlex.join(["stoker", *words])
        return {key: found[key] for key in ("loss", "tokens", "step")} | _shown(found, found["sequences"], command)

    async def _rows(self, text: str, values: Mapping[str, Any]) -> dict[str, Any]:
        begin, count, packed = _window(values, MOST_ROWS)
        options = ["--samples", str(count), "--offset", str(begin), *(["--packed"] if packed else [])]
        options += stage_words(values)
        found = await self.jobs.answer("data", text, ["--json", *options], AUDIT_SECONDS)
        total = found.get("packed_sequences" if packed else "sequences", 0)
        if total == 0 and found.get("errors"):  # every row is dropped
            raise PageError(400, problem_of(found["errors"][0], "job.yaml"))
        return _shown(found, total, shlex.join(["stoker", "data", "job.yaml", *options]))


def _checkpoints(folder: RunFolder, base: Path) -> list[int] | None:
    """Returns the steps of a run's checkpoints; None if they are at a URL, which is not queried."""
    from stoker.checkpoint.dcp_store import Store, place_of  # imports torch

    place = place_of(load_job(folder.job).job.checkpoint.to, folder, base)
    return Store(place).steps() if isinstance(place, Path) else None


def _window(values: Mapping[str, Any], most: int) -> tuple[int, int, bool]:
    """Parses the first sequence, the number of sequences, and whether they are packed."""
    begin = number_of(values, "offset", default=0, most=1 << 40)
    return begin, number_of(values, "limit", default=min(50, most), least=1, most=most), flag_of(values, "packed")


def _shown(found: dict[str, Any], total: int | None, command: str) -> dict[str, Any]:
    """Returns the sequences of a verb's answer."""
    if "packed" in found:
        return {"total": total, "sequences": sequences_of(found["packed"]), "command": command}
    return {"total": total, "rows": rows_of(found.get("samples")), "command": command}
