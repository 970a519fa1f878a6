"""Errors of the page's API, all of one shape, with the position of the problem if there is one.

Texts are English; the browser translates them by `static/texts.zh.json`, which has a form for each.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from stoker.errors import Problem, UserError
from stoker.page.access.mask_secrets import mask_secrets

Value = str | int | float
_NAMED = re.compile(r"\{(\w+)\}")


class PageError(Exception):
    """A request that fails.

    Attributes:
        status: of HTTP.
        problem: the problem, and what to do instead.
        retry_after: seconds after which the client may retry; None if a retry does not help.
    """

    def __init__(self, status: int, problem: Problem, *, retry_after: int | None = None) -> None:
        self.problem = problem
        super().__init__(str(problem))
        self.status, self.retry_after = status, retry_after

    def as_json(self) -> dict[str, Any]:
        """Returns the body of the answer."""
        return {"error": problem_json(self.problem)}


def page_problem(message: str, hint: str = "", **values: Value) -> Problem:
    """Returns a problem that the page itself reports.

    Args:
        message, hint: literal texts, with placeholders ``{name}`` for values.
    """
    return Problem(_filled(message, values), _filled(hint, values))


def http_error(
    status: int, message: str, hint: str = "", *, retry_after: int | None = None, **values: Value
) -> PageError:
    """Returns the error of a refused request, with a message of the page; see `page_problem`."""
    return PageError(status, page_problem(message, hint, **values), retry_after=retry_after)


def bad_request(message: str, hint: str = "", **values: Value) -> PageError:
    """Returns the error of an invalid request; see `page_problem`."""
    return PageError(400, page_problem(message, hint, **values))


def not_found(message: str, hint: str = "", **values: Value) -> PageError:
    """Returns the error of a request for something that does not exist; see `page_problem`."""
    return PageError(404, page_problem(message, hint, **values))


def passed_on(status: int, text: str) -> PageError:
    """Returns an error with the message of a verb or a server that the page started."""
    return PageError(status, Problem(text[:500]))


def server_message(content: bytes) -> str:
    """Returns the message of an error of `stoker serve`; empty if it has none."""
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""


def server_error(status: int, message: str) -> PageError:
    """Returns the error of a server of models with its message."""
    return passed_on(400 if status < 500 else 502, mask_secrets(message))


def of_user_error(error: UserError) -> PageError:
    """Returns the response to an error of the packages below: its first problem."""
    return PageError(400, error.problems[0] if error.problems else page_problem("the request is wrong"))


def problem_json(problem: Problem) -> dict[str, Any]:
    """Converts a problem to JSON types."""
    place = {"file": problem.file, "line": problem.line, "column": problem.column, "key": problem.key}
    found = {"message": problem.message, "hint": problem.suggestion, **place, "repeats": problem.repeats}
    return found | ({"columns": asdict(problem.columns)} if problem.columns else {})


def _filled(template: str, values: Mapping[str, Value]) -> str:
    """Fills a template with its values, numbers with thousands separators."""
    return _NAMED.sub(lambda found: _shown(values[found[1]]), template)


def _shown(value: Value) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return f"{value:,}" if isinstance(value, int) else value
