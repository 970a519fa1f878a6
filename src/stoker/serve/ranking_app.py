"""Routes of a server for ranking models: rows in, scores out."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from stoker.data.ranking.encode_rows import BadRowError
from stoker.errors import did_you_mean
from stoker.serve.api_error import ApiError, bad_request, failed
from stoker.serve.app import guarded
from stoker.serve.guard import unless_left
from stoker.serve.metrics import CALLER, Metrics
from stoker.serve.request_body import Body, parse
from stoker.serve.score_batcher import ScoreBatcher
from stoker.serve.server_options import ServerOptions
from stoker.serve.server_state import ServerState
from stoker.train.ranking.ranking_scorer import RowScores

MOST_ROWS = 10_000  # rows per request
STORES = ("redis", "lmdb", "stoker.online_store")  # modules whose errors are errors of the store


class RowsBody(Body):
    """The body of ``/v1/score``."""

    model: str
    rows: list[dict[str, Any]] = Field(min_length=1, max_length=MOST_ROWS)
    lookups: bool = False


class RankingService(ServerState):
    """State of a server of ranking models.

    Attributes:
        models: batchers by model name.
    """

    def __init__(self, models: dict[str, ScoreBatcher], options: ServerOptions, metrics: Metrics) -> None:
        super().__init__(options, metrics)
        self.models = models

    @property
    def alive(self) -> bool:
        return all(batcher.alive for batcher in self.models.values())

    def find(self, name: str) -> ScoreBatcher:
        """Finds a model by its name.

        Raises:
            ApiError: there is no such model.
        """
        if name in self.models:
            return self.models[name]
        hint = did_you_mean(name, self.models) or f"there are {', '.join(self.models)}"
        raise ApiError(404, f"there is no model {name[:100]!r}; {hint}", param="model", code="model_not_found")

    def ignored_headers(self, unknown: Sequence[str]) -> dict[str, str]:
        """Returns the header that names fields that are not columns; each is also logged once."""
        shown = [name.encode("ascii", "backslashreplace").decode()[:100] for name in sorted(unknown)[:20]]
        new = [name for name in shown if name.isprintable() and name not in self._named]
        if new and len(self._named) < 1000:
            self._named.update(new)
            print(f"fields that are not columns of the model: {', '.join(new)}", file=sys.stderr, flush=True)
        return {"x-stoker-ignored": ", ".join(name for name in shown if name.isprintable())} if unknown else {}


def ranking_app(service: RankingService) -> ASGIApp:
    """Returns the ASGI application."""
    routes = [
        Route("/v1/models", partial(_models, service), methods=["GET"]),
        Route("/v1/models/{name:path}", partial(_model, service), methods=["GET"]),
        Route("/v1/score", partial(_score, service), methods=["POST"]),
    ]
    return guarded(service, routes)


def _described(name: str, batcher: ScoreBatcher) -> dict[str, Any]:
    features, step = batcher.scorer.features, batcher.scorer.step
    columns = [column.name for column in features.columns if column.stored]
    return {"id": name, "object": "model", "owned_by": "stoker", "step": step, "columns": columns} | {
        "labels": list(features.labels),
        "outputs": list(features.outputs),
    }


async def _models(service: RankingService, _: Request) -> Response:
    data = [_described(name, batcher) for name, batcher in service.models.items()]
    return JSONResponse({"object": "list", "data": data})


async def _model(service: RankingService, request: Request) -> Response:
    name = request.path_params["name"]
    return JSONResponse(_described(name, service.find(name)))


async def _score(service: RankingService, request: Request) -> Response:
    body, _ = parse(RowsBody, await service.read(request))
    batcher = service.find(body.model)
    with service.queue.holding(1), service.metrics.answers.labels(body.model, CALLER.get()).time():
        found = await unless_left(request.receive, _answered(batcher, body), service.options.seconds)
    service.metrics.rows.labels(body.model, CALLER.get()).inc(len(body.rows))
    service.metrics.step.labels(body.model).set(found.step)
    data = _data(found)
    if body.lookups:
        for entry, counts in zip(data, await _lookups(batcher, body), strict=True):
            entry["lookups"] = {name: {"found": have, "missing": lack} for name, (have, lack) in counts.items()}
    answer = {
        "object": "list",
        "model": body.model,
        "step": found.step,
        "probabilities": found.probabilities,
        "data": data,
    }
    return JSONResponse(answer, headers=service.ignored_headers(list(found.unknown)))


async def _answered(batcher: ScoreBatcher, body: RowsBody) -> RowScores:
    try:
        answer = await asyncio.wrap_future(batcher.score(body.rows))
    except Exception as error:
        raise _reason(error) from error
    if isinstance(answer, BadRowError):
        raise bad_request(f"`rows[{answer.row}]`: {answer.reason}", param=f"rows[{answer.row}]", code="invalid_value")
    return answer


async def _lookups(batcher: ScoreBatcher, body: RowsBody) -> list[dict[str, tuple[int, int]]]:
    try:
        return await run_in_threadpool(batcher.scorer.lookups, body.rows)
    except Exception as error:
        raise _reason(error) from error


def _reason(error: Exception) -> ApiError:
    """Converts an error to a response; an unreadable store gets 503, so that the client retries."""
    if type(error).__module__.startswith(STORES):
        reason = f"the store of its rows cannot be read: {type(error).__name__}"
        print(f"{reason}: {error}", file=sys.stderr, flush=True)
        return ApiError(503, reason, code="store_failed", retry_after=1)
    return failed(error)


def _data(found: RowScores) -> list[dict[str, Any]]:
    return [
        {"object": "score", "index": n, "score": row[0], "scores": dict(zip(found.outputs, row, strict=True))}
        for n, row in enumerate(found.scores.tolist())
    ]
