"""Errors in the format of OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
    """Error response to a request.

    Attributes:
        status: HTTP status.
        param: the wrong field of the request.
        code: error code for programs.
        retry_after: seconds after which the client may retry; None if a retry does not help.
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
        """Headers of the response. OpenAI's clients retry after any status from 500 unless told otherwise."""
        found = {"www-authenticate": "Bearer"} if self.status == 401 else {}
        if self.retry_after is not None:
            return found | {"retry-after": str(self.retry_after)}
        return found | {"x-should-retry": "false"}

    def as_json(self) -> dict[str, Any]:
        """Returns the body of the response."""
        kind = KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def bad_request(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    """Returns the error for an invalid request."""
    return ApiError(400, message, param=param, code=code)


def model_not_found(name: str, names: Iterable[str]) -> ApiError:
    """Returns the error for a name that no model has."""
    message = f"there is no model {name[:100]!r}; there are: {', '.join(names)}"
    return ApiError(404, message, param="model", code="model_not_found")


def of_user_error(error: UserError, *, param: str | None = None) -> ApiError:
    """Converts a `UserError` to an error response."""
    message = "; ".join(str(problem) for problem in error.problems)
    code = "context_length_exceeded" if "was built for" in message else None
    return bad_request(message, param=param, code=code)


def failed(error: BaseException | None) -> ApiError:
    """Returns the error for a request whose forward pass failed."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return ApiError(503, "the model ran out of memory over this request", code="out_of_memory", retry_after=5)
    return ApiError(500, f"the model failed: {type(error).__name__}", code="engine_failed")
