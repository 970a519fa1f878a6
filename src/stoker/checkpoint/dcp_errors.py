"""Unwraps torch.distributed.checkpoint's errors to the original error of a process or of the disk."""

from __future__ import annotations

import errno

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def innermost(error: BaseException) -> BaseException:
    """Returns the error of the first process that failed; the error itself where nothing is wrapped."""
    failures = list(getattr(error, "failures", {}).values())
    return innermost(failures[0][0]) if failures else error


def os_error(error: BaseException) -> OSError | None:
    """Returns the operating system's error that torch.distributed.checkpoint wraps; None without one."""
    if isinstance(error, OSError):
        return error
    inner = [*getattr(error, "failures", {}).values(), error.__cause__, error.__context__]
    for item in inner:
        candidate = item[0] if isinstance(item, tuple) else item
        if isinstance(candidate, BaseException) and (found := os_error(candidate)) is not None:
            return found
    full = "No space left" in str(error) or "file write failed" in str(error)  # torch's own writer gives no code
    return OSError(errno.ENOSPC, "No space left on device") if full else None
