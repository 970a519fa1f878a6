"""Unwraps torch.distributed.checkpoint's errors to the original error of a process or of the disk."""

from __future__ import annotations

import errno

from stoker.errors import chained

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def innermost(error: BaseException) -> BaseException:
    """Returns the error of the first process that failed; the error itself where nothing is wrapped."""
    failures = list(getattr(error, "failures", {}).values())
    return innermost(failures[0][0]) if failures else error


def os_error(error: BaseException) -> OSError | None:
    """Returns the operating system's error that torch.distributed.checkpoint wraps; None without one."""
    if found := next((each for each in chained(error) if isinstance(each, OSError)), None):
        return found
    full = "No space left" in str(error) or "file write failed" in str(error)  # torch's own writer gives no code
    return OSError(errno.ENOSPC, "No space left on device") if full else None
