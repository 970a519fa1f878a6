"""Errors of the page's API: one shape for all, with the place of what is wrong where there is one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker.errors import Problem, UserError


class PageError(Exception):
    """A request that is not answered.

    Attributes:
        status: of HTTP.
        problem: what is wrong, and what to do instead.
        retry_after: seconds after which the client may try again; None where trying again does not help.
    """

    def __init__(self, status: int, message: str | Problem, hint: str = "", *, retry_after: int | None = None) -> None:
        self.problem = message if isinstance(message, Problem) else Problem(message, hint)
        super().__init__(str(self.problem))
        self.status, self.retry_after = status, retry_after

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers of the answer."""
        return {} if self.retry_after is None else {"retry-after": str(self.retry_after)}

    def as_json(self) -> dict[str, Any]:
        """The body of the answer."""
        problem = self.problem
        return {
            "error": {
                "message": problem.message,
                "hint": problem.suggestion,
                "file": problem.file,
                "line": problem.line,
                "column": problem.column,
            }
        }


def wrong(message: str, hint: str = "") -> PageError:
    """The error of a request that cannot be answered as it is."""
    return PageError(400, message, hint)


def missing(what: str, hint: str = "") -> PageError:
    """The error of a request for something that is not there."""
    return PageError(404, what, hint)


def of_user_error(error: UserError) -> PageError:
    """The answer for an error that the rooms below raise: its first problem."""
    return PageError(400, error.problems[0] if error.problems else "the request is wrong")
