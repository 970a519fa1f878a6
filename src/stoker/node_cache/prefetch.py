"""Fetches the files of a source ahead of their use, in order."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress

from stoker.errors import UserError
from stoker.node_cache.file_locks import HeldLock
from stoker.node_cache.object_cache import node_cache
from stoker.node_cache.remote_file import RemoteFile

AT_ONCE = 4  # concurrent downloads: small files cost a round trip each
AHEAD = 8 * 2**30  # maximum of bytes that wait to be read; at most a quarter of the cache's limit


class Prefetch:
    """Fetches files in their order, in threads, no further ahead of the reader than the cache can hold.

    What has been fetched stays in the cache until it has been read. An error is left to the reader, who meets it at
    the file that it concerns.
    """

    def __init__(self, files: Sequence[RemoteFile]) -> None:
        self._files = files
        self._ahead = min(AHEAD, node_cache().limit // 4)
        self._changed = threading.Condition()
        self._reading = self._next = 0
        self._over = False
        self._pins: dict[int, HeldLock] = {}
        for number in range(min(AT_ONCE, len(files))):
            threading.Thread(target=self._fetch_all, daemon=True, name=f"stoker-prefetch-{number}").start()

    def in_turn(self) -> Iterator[RemoteFile]:
        """Yields the files, each when it is to be read; afterwards it may leave the cache."""
        try:
            for number, file in enumerate(self._files):
                with self._changed:
                    self._reading = number
                    done = [self._pins.pop(other) for other in list(self._pins) if other < number]
                    self._changed.notify_all()
                for pin in done:
                    pin.close()
                yield file
        finally:
            self.close()

    def close(self) -> None:
        """Stops; partial downloads stay and can be continued."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
        while self._pins:
            self._pins.popitem()[1].close()

    def _fetch_all(self) -> None:
        while (number := self._take()) is not None:
            with suppress(UserError, OSError):
                _, pin = node_cache().fetch(self._files[number].found, stop=lambda: self._over, waits=False)
                with self._changed:
                    if number < self._reading or self._over:
                        pin.close()
                    else:
                        self._pins[number] = pin

    def _take(self) -> int | None:
        """Returns the next file to fetch, once there is room for it; None at the end."""
        with self._changed:
            while not self._over:
                self._next = max(self._next, self._reading)
                if self._next >= len(self._files):
                    return None
                waiting = sum(file.size for file in self._files[self._reading : self._next])
                if self._next == self._reading or waiting + self._files[self._next].size <= self._ahead:
                    self._next += 1
                    return self._next - 1
                self._changed.wait()
        return None
