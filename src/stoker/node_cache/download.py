"""Downloads one object in order, from the end of an earlier download; only complete and verified bytes are stored."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Protocol

from stoker.errors import Problem, RunFailed, reason_of
from stoker.files import flush_folder, no_link, write_all
from stoker.node_cache.cache_entry import CacheEntry, boot_id, cache_errors
from stoker.node_cache.cache_stats import HERE, CacheStats
from stoker.node_cache.file_locks import HeldLock
from stoker.node_cache.object_version import ObjectVersion
from stoker.node_cache.origin import OriginStore
from stoker.node_cache.urls import without_secrets

TRIES = 6  # consecutive attempts without a byte, before the download fails
WAIT = 0.2  # seconds before the second of them, doubled before each further one
CHECKED_AGAIN = 2  # downloads with a wrong checksum, before the origin is blamed


class ObjectChanged(RunFailed):
    """The object's content has changed since it was first requested, or does not fit its checksum."""


class Feed(Protocol):
    """Yields the bytes of an object from an offset on, in order; may end early with an `OSError`."""

    def __call__(self, url: str, version: ObjectVersion, start: int) -> Iterator[bytes]: ...


class Download:
    """Appends an object's bytes to its partial file.

    Args:
        lock: the entry's; this object lets it go when it is closed.
        peers: asked before the origin; None without.
        room: makes place for a number of further bytes.

    Raises:
        RunFailed: the cache cannot be written.
    """

    def __init__(
        self,
        url: str,
        version: ObjectVersion,
        entry: CacheEntry,
        lock: HeldLock,
        *,
        peers: Feed | None,
        room: Callable[[int], None],
    ) -> None:
        self._url, self._version, self._entry, self._lock = url, version, entry, lock
        self._peers, self._room = peers, room
        self._pieces: Iterator[bytes] | None = None
        self._from_peer = False
        self._failed = self._unfit = 0
        self._origin: OriginStore | None = None
        self._got = {"origin_bytes": 0, "peer_bytes": 0}
        self._file: Any = None
        self._hasher: Any = None
        with cache_errors(self._entry.folder.parent):
            self._begin(fresh=version.size is None)

    def advance(self) -> bool:
        """Adds the next bytes; true once the object is whole.

        Raises:
            RunFailed: the origin does not give them, or has changed; or they cannot be written.
            UserError: the origin refuses them.
        """
        size = self._version.size
        if self._file is None:
            return True
        if self._at == size:
            return self._is_confirmed() and self._finish()
        try:
            self._pieces = self._pieces or self._next_feed()
            piece = next(self._pieces, b"")
            if not piece and size is not None:
                raise ConnectionError(f"it ended after {self._at} of {size} bytes")
        except OSError as error:
            self._retry(error)
            return False
        if not piece:
            self._confirmed = self._from_peer
            return self._finish()
        if size is not None and self._at + len(piece) > size:
            self._start_over("it is longer than its origin said")
        else:
            self._write(piece)
        return False

    def _is_confirmed(self) -> bool:
        """Waits until the peer that sent the last bytes confirms their checksum; starts over if it does not.

        A part of an earlier download may differ from the bytes that the peer has verified.
        """
        if self._from_peer and self._pieces is not None:
            try:
                more = next(self._pieces, b"")
            except OSError:
                self._start_over("the node that gave it did not check it")
                return False
            if more:
                self._start_over("it is longer than its origin said")
                return False
            self._confirmed = self._from_start
        return True

    def close(self) -> None:
        """Releases the entry; its bytes stay for the next download."""
        pieces, self._pieces = self._pieces, None
        if pieces is not None and hasattr(pieces, "close"):
            pieces.close()
        if self._file is not None:
            self._file.close()
            self._file = None
            with suppress(OSError):
                self._note()
        self._lock.close()

    @property
    def _at(self) -> int:
        return int(self._file.tell())

    def _begin(self, *, fresh: bool) -> None:
        """Opens the partial file for appending."""
        about = self._entry.about()
        self._entry.note(self._url, self._version)
        # After a crash of the machine, a file may contain bytes that were never written to it.
        fresh = fresh or about.get("boot") != boot_id()
        if fresh:
            self._entry.partial.unlink(missing_ok=True)  # a reader that has it open detects its removal
        self._file = open(  # noqa: SIM115 -- closed by `close`
            self._entry.partial, "ab", buffering=0, opener=no_link
        )
        size = self._version.size
        if size is not None and self._at > size:
            self._file.truncate(size)
            self._file.seek(size)
        self._confirmed, self._from_start = False, self._at == 0
        peer_bytes = 0 if fresh else min(self._at, int(about.get("peer_bytes", 0)))
        self._got = {"origin_bytes": self._at - peer_bytes, "peer_bytes": peer_bytes}
        self._hasher = self._version.hasher()
        self._hash_partial(self._hasher)
        self._room((size or self._at) - self._at)

    def _next_feed(self) -> Iterator[bytes]:
        if self._peers is not None:
            self._from_peer = True
            return self._peers(self._url, self._version, self._at)
        self._from_peer = False
        self._origin = self._origin or OriginStore(self._url)
        return self._origin.pieces(self._url, self._version, self._at)

    def _write(self, piece: bytes) -> None:
        with cache_errors(self._entry.folder.parent):
            write_all(self._file, piece)
        if self._hasher is not None:
            self._hasher.update(piece)
        self._failed = 0
        kind = "peer_bytes" if self._from_peer else "origin_bytes"
        self._got[kind] += len(piece)
        HERE.add(CacheStats(**{kind: len(piece)}))

    def _retry(self, error: OSError) -> None:
        """Continues after a broken transfer: immediately from the origin if a peer failed, else after a delay."""
        self._pieces = None
        if self._from_peer:
            self._peers = None
            return
        self._check_unchanged()
        self._failed += 1
        if self._failed == TRIES:
            raise RunFailed(
                Problem(
                    f"{without_secrets(self._url)} cannot be downloaded: {reason_of(error)}",
                    f"{self._at:,} bytes are kept, and the next download goes on after them",
                )
            ) from error
        time.sleep(WAIT * 2 ** (self._failed - 1))

    def _check_unchanged(self) -> ObjectVersion:
        self._origin = self._origin or OriginStore(self._url)
        now = self._origin.version(self._url)
        if not now.same_content(self._version):
            self._entry.partial.unlink(missing_ok=True)
            raise ObjectChanged(
                Problem(f"{without_secrets(self._url)} has changed while it was read", "run the same command again")
            )
        return now

    def _finish(self) -> bool:
        """Verifies the bytes and stores them."""
        if not self._is_trusted:
            self._check_unchanged()
        checksum = self._checksum()
        if not checksum.fits(self._hasher_of(checksum)):
            self._start_over("its bytes do not fit the checksum that its origin gives")
            return False
        with cache_errors(self._entry.folder.parent):
            os.fsync(self._file.fileno())
            self._note()
            self._entry.partial.replace(self._entry.data)
            flush_folder(self._entry.folder)
        self._file.close()
        self._file = None
        return True

    @property
    def _is_trusted(self) -> bool:
        """Returns whether a peer has sent all the bytes, and has verified them."""
        return self._confirmed and not self._got["origin_bytes"]

    def _checksum(self) -> ObjectVersion:
        """Returns the version with its checksum, which may need another request."""
        if self._version.checksum or self._is_trusted or self._origin is None:
            return self._version
        found = self._origin.checksum(self._url, self._version)
        return ObjectVersion(self._version.size, self._version.tag, found)

    def _hasher_of(self, version: ObjectVersion) -> Any:
        if version.checksum == self._version.checksum:
            return self._hasher
        hasher = version.hasher()
        self._hash_partial(hasher)
        return hasher

    def _hash_partial(self, hasher: Any) -> None:
        """Updates a hash object with the bytes of the partial file; does nothing without one."""
        if hasher is not None:
            with self._entry.partial.open("rb") as file:
                while block := file.read(2**20):
                    hasher.update(block)

    def _start_over(self, why: str) -> None:
        self._pieces, self._peers = None, None
        self._unfit += not self._from_peer
        self._check_unchanged()
        self._file.close()
        if self._unfit == CHECKED_AGAIN:
            self._entry.partial.unlink(missing_ok=True)
            message = f"{without_secrets(self._url)} cannot be downloaded: {why}"
            raise ObjectChanged(Problem(message, "put it there again"))
        with cache_errors(self._entry.folder.parent):
            self._begin(fresh=True)

    def _note(self) -> None:
        self._entry.note(self._url, self._version, **self._got)
