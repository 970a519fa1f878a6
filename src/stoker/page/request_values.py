"""Reads the values of a request's body or query, and refuses those of another kind."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from stoker.json_values import refuse_constant
from stoker.page.page_error import PageError, bad_request, http_error
from stoker.page.page_settings import BODY

WORD = re.compile(r"[A-Za-z0-9][\w.,/=-]{0,200}")
BODY_SECONDS = 60.0  # longest time for a body to arrive


async def read_object(request: Request) -> dict[str, Any]:
    """Returns the JSON object of a request's body; an empty body is an empty object.

    Raises:
        PageError: it is too large, comes too slowly, or is not a JSON object.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > BODY:
                    raise http_error(413, "the body has more than {most} bytes", most=BODY)
    except TimeoutError:
        raise http_error(408, "the body was not received within {seconds} s", seconds=BODY_SECONDS) from None
    if not body:
        return {}
    if kind != "application/json":
        raise http_error(415, "the body must be JSON", "Content-Type: application/json")
    try:
        found = json.loads(bytes(body), parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
        raise bad_request("the body is not JSON: {reason}", reason=reason) from None
    if not isinstance(found, dict):
        raise bad_request("the body is not a JSON object", "write it as {...}")
    return found


def text_of(body: Mapping[str, Any], key: str, *, default: str | None = None, most: int = 1 << 20) -> str:
    """Returns a text of a body.

    Raises:
        PageError: it is missing, no text, or too long.
    """
    value = body.get(key, default)
    if not isinstance(value, str):
        raise bad_request("`{key}` must be text", key=key) if key in body else _absent(key)
    if len(value) > most:
        raise bad_request("`{key}` has more than {most} characters", key=key, most=most)
    if "\x00" in value or any("\ud800" <= character <= "\udfff" for character in value):
        raise bad_request("`{key}` contains a forbidden character", key=key)
    return value


def as_word(name: str, value: Any) -> str:
    """Returns an option's value that is one word.

    Raises:
        PageError: the value is not a word.
    """
    text = str(value) if isinstance(value, str | int) and not isinstance(value, bool) else ""
    if not WORD.fullmatch(text) or ".." in text or text.startswith("/"):
        raise bad_request("`{key}` must be a word", key=name)
    return text


def flag_of(values: Any, key: str) -> bool:
    """Returns a flag of a body or a query; False if it is missing.

    Raises:
        PageError: it is neither true nor false.
    """
    value = values.get(key, False)
    if value not in (True, False, "0", "1", "true", "false"):
        raise bad_request("`{key}` must be true or false", key=key)
    return value in (True, "1", "true")


def number_of(values: Any, key: str, *, default: int | None = None, least: int = 0, most: int = 1 << 62) -> int:
    """Returns a whole number of a body or a query.

    Raises:
        PageError: it is missing, none, or out of bounds.
    """
    value = values.get(key, default)
    if isinstance(value, str) and len(value) < 20 and value.removeprefix("-").isdecimal():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise bad_request("`{key}` must be a whole number", key=key) if key in values else _absent(key)
    if not least <= value <= most:
        raise bad_request(
            "`{key}` is {value}, and must be from {least} to {most}", key=key, value=value, least=least, most=most
        )
    return value


def _absent(key: str) -> PageError:
    return bad_request("`{key}` is missing", key=key)
