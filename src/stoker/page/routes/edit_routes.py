"""Routes of edits to a job's YAML by the keys of its form."""

from __future__ import annotations

import re
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.routing import Route

from stoker.job.document.text_file import LARGEST_FILE
from stoker.page.jobs.edit_job import apply_edits
from stoker.page.page_error import bad_request
from stoker.page.request_values import read_object, text_of
from stoker.page.routing import route

MOST_EDITS = 200
LARGE_INTEGER = re.compile(r"-?[1-9]\d{15,400}")  # which JavaScript would round


def edit_routes() -> list[Route]:
    """Returns the route of edits; it reads and writes no file."""
    return [route("/api/edit", edit, method="POST", role="run")]


async def edit(request: Request) -> Any:
    """Returns the text after the edits, its comments kept."""
    body = await read_object(request)
    text, given = text_of(body, "yaml", most=LARGEST_FILE), body.get("edits")
    if not isinstance(given, list) or len(given) > MOST_EDITS:
        raise bad_request("`edits` must be a list of at most {most}", most=MOST_EDITS)
    edits = []
    for each in given:
        if not isinstance(each, dict) or not isinstance(each.get("key"), str) or "value" not in each:
            raise bad_request("an edit has to have a `key` and a `value`")
        edits.append((each["key"], _exact(each["value"])))
    return {"yaml": await run_in_threadpool(apply_edits, text, edits)}


def _exact(value: Any) -> Any:
    """Returns the value of an edit: of a large integer that was sent as text, the integer."""
    return int(value) if isinstance(value, str) and LARGE_INTEGER.fullmatch(value) else value
