"""One version of one object in the cache: a folder with its bytes, complete or partial, and its metadata.

data        the bytes, once they are complete and verified
partial     the bytes downloaded so far, from the first on
about.json  the URL, the version, and the origin of the bytes
lock        locked by the downloading process
use         locked, shared, by readers; its modification time is that of the last use
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from stoker.errors import Problem, RunFailed, reason_of
from stoker.files import replace_file
from stoker.node_cache.file_locks import HeldLock, lock_file
from stoker.node_cache.object_version import ObjectVersion
from stoker.node_cache.urls import without_secrets

ABOUT = "about.json"


@contextmanager
def cache_errors(folder: Path) -> Iterator[None]:
    """Turns errors of the disk, while the block writes into the cache, into `RunFailed`."""
    try:
        yield
    except OSError as error:
        what = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or reason_of(error)
        hint = "free some space, `stoker cache clean`, or set STOKER_CACHE to another folder"
        raise RunFailed(Problem(f"the cache cannot be written: {what}", hint, file=str(folder))) from error


@dataclass(frozen=True)
class CacheEntry:
    """The folder of an object's content; it need not exist."""

    folder: Path

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def partial(self) -> Path:
        return self.folder / "partial"

    @property
    def is_whole(self) -> bool:
        """Returns whether all bytes are here, verified."""
        return self.data.exists()

    def pin(self) -> HeldLock:
        """Prevents eviction of the entry until the lock is closed, and marks it as the most recently used.

        Raises:
            RunFailed: the cache cannot be written.
        """
        while True:
            with cache_errors(self.folder.parent), suppress(FileNotFoundError):  # where it was being removed
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                pinned = lock_file(self.folder / "use", shared=True)
                assert pinned is not None
                with suppress(OSError):
                    os.utime(self.folder / "use")
                return pinned

    def lock(self) -> HeldLock | None:
        """Returns the lock for downloading the entry, which is pinned; None if another process or thread holds it."""
        return lock_file(self.folder / "lock", wait=False)

    def about(self) -> dict[str, Any]:
        """Returns the metadata; empty if there is none."""
        try:
            values = json.loads((self.folder / ABOUT).read_bytes())
        except (OSError, ValueError):
            return {}
        return values if isinstance(values, dict) else {}

    def note(self, url: str, version: ObjectVersion, **values: Any) -> None:
        """Writes the metadata. Signatures and passwords of a URL are not stored."""
        about = {**self.about(), "url": without_secrets(url), **version.plain(), "boot": boot_id(), **values}
        replace_file(self.folder / ABOUT, json.dumps(about))

    def here(self) -> int:
        """Bytes on the disk."""
        found = self._stat()
        return found.st_size if found is not None else 0

    def written(self) -> float:
        """Returns the time of the last write of its bytes, in seconds since 1970; 0 if there are none."""
        found = self._stat()
        return found.st_mtime if found is not None else 0.0

    def _stat(self) -> os.stat_result | None:
        """Returns the status of the file with its bytes; None if there is none."""
        for path in (self.data, self.partial):
            with suppress(OSError):
                return path.stat()
        return None

    def used(self) -> float:
        """Returns the time of the last use, in seconds since 1970."""
        with suppress(OSError):
            return (self.folder / "use").stat().st_mtime
        return 0.0

    @property
    def in_use(self) -> bool:
        """Returns whether a process reads or downloads it at this moment."""
        with suppress(FileNotFoundError):
            for name in ("use", "lock"):
                if (self.folder / name).exists():
                    held = lock_file(self.folder / name, wait=False)
                    if held is None:
                        return True
                    held.close()
        return False

    def remove(self) -> bool:
        """Deletes it, unless a process reads or downloads it; returns whether it is gone."""
        try:
            used = lock_file(self.folder / "use", wait=False)
            if used is None:
                return False
            with used:
                downloading = lock_file(self.folder / "lock", wait=False)
                if downloading is None:
                    return False
                with downloading:
                    for name in ("data", "partial", ABOUT, f".{ABOUT}.partial", "lock", "use"):
                        (self.folder / name).unlink(missing_ok=True)
                    with suppress(OSError):  # a process that recreates it at this moment has written a file into it
                        self.folder.rmdir()
        except FileNotFoundError:
            pass
        return True


@cache
def boot_id() -> str:
    """Returns an identifier of this machine's boot; empty if the system has none."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def entries(root: Path) -> Iterator[CacheEntry]:
    """Yields all entries below a folder."""
    with suppress(FileNotFoundError), os.scandir(root) as found:
        for each in found:
            yield CacheEntry(root / each.name)
