"""Reads an object while this process or another one downloads it."""

from __future__ import annotations

import io
import os
import threading
import time
from pathlib import Path
from typing import Any

from stoker.errors import Problem
from stoker.node_cache.cache_stats import HERE, CacheStats
from stoker.node_cache.download import Download, ObjectChanged
from stoker.node_cache.object_cache import POLL, NodeCache, RemoteObject
from stoker.node_cache.urls import without_secrets

IDLE = 1.0  # seconds after which a reader that does not read leaves its download to others
COMPARED = 2**20  # bytes compared at a time


class ObjectReader(io.RawIOBase):
    """The bytes of an object, from its first one, or from ``start``, to its last one.

    Bytes can be read as soon as they have arrived. If no other process downloads the object, this one does, as far as
    it is read; after `IDLE` seconds without a read it leaves the download to others. The entry is not evicted until the
    reader is closed.

    Raises:
        RunFailed: it cannot be downloaded; `ObjectChanged` if the bytes already read are no longer valid.
    """

    def __init__(self, cache: NodeCache, found: RemoteObject, *, start: int = 0) -> None:
        super().__init__()
        self._cache, self._found, self._entry = cache, found, cache.entry(found)
        self._pin = self._entry.pin()
        self._download: Download | None = None
        self._descriptor = -1
        self._at = start
        self._guard, self._used = threading.Lock(), time.monotonic()
        HERE.asked(found.key, whole=self._entry.is_whole)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with self._guard:
            try:
                return self._read_into(buffer)
            finally:
                self._used = time.monotonic()

    def _read_into(self, buffer: Any) -> int:
        if self._wait() <= self._at:
            return 0
        data = os.pread(self._descriptor, len(buffer), self._at)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def close(self) -> None:
        """Closes the reader; a download of this reader ends, too, and can be continued."""
        if not self.closed:
            with self._guard:
                self._end_download()
            if self._descriptor >= 0:
                os.close(self._descriptor)
            self._pin.close()
        super().close()

    def _wait(self) -> int:
        """Waits for bytes behind the position; returns how many there are from the first on."""
        if self._descriptor >= 0 and (here := os.fstat(self._descriptor).st_size) > self._at:
            return here
        began = time.monotonic()
        try:
            while True:
                whole = self._entry.is_whole
                self._open()
                here = os.fstat(self._descriptor).st_size if self._descriptor >= 0 else 0
                if here > self._at or whole:
                    return here
                if self._download is None:
                    self._begin()
                if self._download is None:
                    time.sleep(POLL)
                elif self._download.advance():
                    self._end_download()
        finally:
            HERE.add(CacheStats(wait_seconds=time.monotonic() - began))

    def _begin(self) -> None:
        self._download = self._cache.begin(self._found, self._entry)
        if self._download is not None:
            words = (self._download,)
            threading.Thread(target=self._end_idle_download, args=words, daemon=True, name="cache-idle").start()

    def _end_download(self) -> None:
        download, self._download = self._download, None
        if download is not None:
            download.close()

    def _end_idle_download(self, download: Download) -> None:
        """Stops a download that is not being read, so that other processes can continue it."""
        while self._download is download:
            time.sleep(IDLE / 4)
            with self._guard:
                if self._download is download and time.monotonic() - self._used > IDLE:
                    self._end_download()

    def _open(self) -> None:
        """Opens the file that counts now. Bytes that were read from one that no longer counts must be in it."""
        if self._descriptor >= 0 and os.fstat(self._descriptor).st_nlink:
            return
        path: Path = self._entry.data if self._entry.is_whole else self._entry.partial
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        if self._descriptor >= 0:
            if os.fstat(descriptor).st_size < self._at:  # the new download has not come so far
                os.close(descriptor)
                return
            if not _same(self._descriptor, descriptor, self._at):
                os.close(descriptor)
                message = (
                    f"{without_secrets(self._found.url)}: bytes that were read before they were checked were damaged"
                )
                raise ObjectChanged(Problem(message, "run the same command again"))
            os.close(self._descriptor)
        self._descriptor = descriptor


def _same(one: int, other: int, size: int) -> bool:
    """Returns whether two files begin with the same bytes."""
    starts = range(0, size, COMPARED)
    return all(
        os.pread(one, min(COMPARED, size - at), at) == os.pread(other, min(COMPARED, size - at), at) for at in starts
    )
