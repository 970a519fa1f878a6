"""Advisory locks between the processes of a machine. The kernel releases them when a process ends, in any way."""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self


class HeldLock:
    """A lock that is held until it is closed."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def close(self) -> None:
        """Releases the lock."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child that was forked meanwhile has the descriptor, too
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def lock_file(path: Path, *, shared: bool = False, wait: bool = True) -> HeldLock | None:
    """Locks a file, which is created if missing; returns None if another process has the lock and ``wait`` is false.

    On a read-only disk, a file that exists is locked.

    Raises:
        FileNotFoundError: its folder is gone.
        OSError: it cannot be created.
    """
    how = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
    while True:
        flags = os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
        try:
            descriptor = os.open(path, flags | os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            if error.errno != errno.EROFS or not path.exists():
                raise
            descriptor = os.open(path, flags | os.O_RDONLY)
        try:
            fcntl.flock(descriptor, how)
            if os.fstat(descriptor).st_nlink:  # else it was deleted meanwhile, and a new file replaces it
                return HeldLock(descriptor)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
