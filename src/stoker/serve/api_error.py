"""Errors in the shape of OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker.errors import UserError

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """A request that is not answered.

    Attributes:
        status: of HTTP.
        param: the field of the request that is wrong.
        code: a word for programs.
        retry_after: seconds after which the client may try again; None where trying again does not help.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after = retry_after

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers of the answer. OpenAI's clients repeat a request after any status from 500 unless told otherwise."""
        found = {"www-authenticate": "Bearer"} if self.status == 401 else {}
        if self.retry_after is not None:
            return found | {"retry-after": str(self.retry_after)}
        return found | {"x-should-retry": "false"}

    def as_json(self) -> dict[str, Any]:
        """The body of the answer."""
        kind = KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def wrong(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    """The error of a request that cannot be answered as it is."""
    return ApiError(400, message, param=param, code=code)


def of_user_error(error: UserError, *, param: str | None = None) -> ApiError:
    """The response for an error that the rooms below raise."""
    message = "; ".join(str(problem) for problem in error.problems)
    code = "context_length_exceeded" if "was built for" in message else None
    return wrong(message, param=param, code=code)


def failed(error: BaseException | None) -> ApiError:
    """The error of a request whose pass through the model failed."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return ApiError(503, "the model ran out of memory over this request", code="out_of_memory", retry_after=5)
    return ApiError(500, f"the model failed: {type(error).__name__}", code="engine_failed")
