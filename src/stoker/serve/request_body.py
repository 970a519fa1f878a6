"""Reading and parsing of request bodies.

Unknown fields are rejected. Fields without effect on the answer are ignored, and named in the response header
``x-stoker-ignored``.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from starlette.requests import Request

from stoker.json_values import refuse_constant
from stoker.serve.api_error import ApiError, bad_request
from stoker.serve.guard import ClientLeft
from stoker.serve.server_options import ServerOptions

IGNORED = frozenset(
    {
        "user",
        "store",
        "metadata",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "prediction",
        "reasoning_effort",
        "verbosity",
        "moderation",
    }
)
"""Fields of OpenAI's API without effect here."""

REFUSED = {
    "functions": "write `tools`",
    "function_call": "write `tool_choice`",
    "audio": "models here write text only",
    "web_search_options": "nothing here searches the web",
    "suffix": "models here continue a prompt at its end only",
}
"""Unsupported fields of OpenAI's API, with what to do instead."""

BODY_SECONDS = 60.0  # timeout for receiving a body
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")

EXPECTED = {
    "dict_type": "`{path}` must be an object",
    "model_type": "`{path}` must be an object",
    "list_type": "`{path}` must be a list",
    "string_type": "`{path}` must be a string",
    "int_type": "`{path}` must be an integer",
    "float_type": "`{path}` must be a number",
    "bool_type": "`{path}` must be true or false",
    "too_short": "`{path}` must not be empty",
    "too_long": "`{path}` must have at most {max_length} items",
}
"""Messages by the type of Pydantic's error."""


class Body(BaseModel):
    """Base of bodies and their parts: no unknown fields, no type conversions.

    Attributes:
        parts: classes of the fields that are made of fields.
    """

    parts: ClassVar[Mapping[str, type[Body]]] = {}

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, given: Any) -> Any:
        """Drops null values, which OpenAI's clients write for missing fields."""
        if isinstance(given, dict):
            return {key: value for key, value in given.items() if value is not None or key not in cls.model_fields}
        return given


class LenientBody(Body):
    """A part of a body in which null values of unknown fields are dropped too, as clients send back whole objects."""

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, given: Any) -> Any:
        return {key: value for key, value in given.items() if value is not None} if isinstance(given, dict) else given


async def read_json(request: Request, options: ServerOptions) -> Any:
    """Reads the body of a request.

    Raises:
        ApiError: it is too large, arrives too slowly, or is not JSON.
        ClientLeft: the client disconnected.
    """
    too_large = ApiError(413, f"the body has more than {options.body:,} bytes", code="body_too_large")
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced[:20]) > options.body:
        raise too_large
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientLeft
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > options.body:
                    raise too_large
                if not message.get("more_body", False):
                    break
    except TimeoutError:
        raise ApiError(408, f"the body was not received within {BODY_SECONDS:g} s") from None
    try:
        text = b"".join(parts).decode("utf-8-sig")
        found = json.loads(text, parse_constant=refuse_constant)
        if _SURROGATE.search(text):
            json.dumps(found, ensure_ascii=False).encode()  # no tokenizer takes half a surrogate pair
        return found
    except UnicodeEncodeError:
        raise bad_request("a text in the body has half a surrogate pair", code="invalid_json") from None
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
        raise bad_request(f"the body is not JSON: {reason}", code="invalid_json") from None


B = TypeVar("B", bound=Body)


def parse(kind: type[B], given: Any) -> tuple[B, list[str]]:
    """Parses a body; returns it with the names of ignored fields.

    Raises:
        ApiError: a field is unknown, missing or wrong; the message names it.
    """
    if not isinstance(given, dict):
        raise bad_request("the body is not a JSON object")
    for name, advice in REFUSED.items():
        empty = given.get(name) in (None, "", [], {})
        if name in given and name not in kind.model_fields and not empty:
            raise bad_request(f"`{name}` is not supported: {advice}", param=name)
    dropped = [name for name in given if name not in kind.model_fields and (name in IGNORED or name in REFUSED)]
    kept = {name: value for name, value in given.items() if name not in dropped}
    try:
        return kind.model_validate(kept), [name for name in dropped if given[name] is not None]
    except ValidationError as error:
        raise _of_pydantic(kind, error, kept) from None


def _of_pydantic(kind: type[Body], error: ValidationError, given: Any) -> Exception:
    """Converts the first validation error of a body to one sentence."""
    found = error.errors(include_url=False)
    first = next((e for e in found if e["type"] == "extra_forbidden"), found[0])
    place = _place(first["loc"], given)
    if first["type"] == "missing":
        place.append(first["loc"][-1])
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".")
    if first["type"] == "extra_forbidden":
        names = _names_beside(kind, place)
        near = get_close_matches(str(place[-1]), names, 1, 0.6)
        hint = f"; did you mean `{near[0]}`?" if near else f"; known are {', '.join(names)}" if names else ""
        return bad_request(f"unknown field `{path}`{hint}", param=path, code="unknown_parameter")
    if first["type"] == "missing":
        return bad_request(f"`{path}` is missing", param=path, code="missing_required_parameter")
    if form := EXPECTED.get(first["type"]):
        message = form.format(path=path, **first.get("ctx", {}))
        return bad_request(message, param=path, code="invalid_value")
    message = first["msg"].removeprefix("Value error, ")
    return bad_request(f"`{path}`: {message}" if path else message, param=path or None, code="invalid_value")


def _place(location: Iterable[int | str], given: Any) -> list[int | str]:
    """Returns the keys and indices of a body that lead to a location; Pydantic's has names of a union's types too."""
    place: list[int | str] = []
    value: Any = given
    for part in location:
        is_index = isinstance(value, list) and isinstance(part, int)
        if is_index or (isinstance(value, dict) and part in value):
            place.append(part)
            value = value[part]
    return place


def _names_beside(kind: type[Body], place: list[Any]) -> list[str]:
    """Returns the fields of the part of a body that contains a location."""
    if len(place) == 1:
        part: type[Body] | None = kind
    else:
        key, depth = str(place[0]), len([step for step in place if not isinstance(step, int)])
        part = kind.parts.get(key) if depth == 2 else None
    return [] if part is None else [field.alias or name for name, field in part.model_fields.items()]
