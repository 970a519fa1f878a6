"""This machine's cache of objects at URLs: each is downloaded once, and a size limit evicts the least recently used."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from stoker.errors import Problem, RunFailed, UserError
from stoker.files import replace_file
from stoker.hardware.cache_folder import cache_folder
from stoker.node_cache import cache_peers
from stoker.node_cache.cache_entry import CacheEntry, cache_errors, entries
from stoker.node_cache.cache_stats import HERE, CacheStats
from stoker.node_cache.download import Download, Feed
from stoker.node_cache.file_locks import HeldLock, lock_file
from stoker.node_cache.object_version import ObjectVersion
from stoker.node_cache.origin import OriginStore
from stoker.node_cache.run_start import run_start
from stoker.node_cache.urls import expand_braces, has_magic, restore_secrets, strip_signature, without_secrets

SHARE = 0.5  # fraction of the disk's free space and the cache's own size that it may use without a limit
FRESH = 2.0  # seconds for which an origin's answer to one process is valid for the others
POLL = 0.02  # seconds between two checks of another process' download
COUNTED = 5.0  # seconds for which a computed size of the cache is valid
ASKED_AT_ONCE = 16  # concurrent requests for a list of objects


@dataclass(frozen=True)
class RemoteObject:
    """An object at a URL with the content that it has at present."""

    url: str
    version: ObjectVersion

    @property
    def key(self) -> str:
        return self.version.key(strip_signature(self.url))


class NodeCache:
    """The cache in a folder. Any number of processes and threads may use it at a time.

    Args:
        root: the folder; made when it is needed.
        feed: returns a stream of the object of a key, which is tried before its origin.
    """

    def __init__(self, root: Path, feed: Callable[[str], Feed | None] = cache_peers.stream_from_peers) -> None:
        self.root, self._feed = root, feed
        self._counting = threading.Lock()
        self._size, self._counted = 0, 0.0

    # -- objects at the origin -------------------------------------------------------------------------

    def find(self, pattern: str) -> list[RemoteObject]:
        """Returns the objects of a URL, sorted by URL: a single one, those of a folder, or those of a pattern.

        Processes that ask within `FRESH` seconds share one answer. Where the origin cannot be reached, its last answer
        is taken: a run that has its data here can start again.

        Raises:
            UserError: there are none, or they may not be read.
            RunFailed: the origin cannot be reached.
        """
        return list(self.answer(f"find {pattern}", pattern, lambda: _found(pattern)))

    def version(self, url: str) -> RemoteObject:
        """Returns the object at a URL.

        Raises:
            UserError: there is no such object, or it may not be read.
            RunFailed: the origin cannot be reached.
        """
        return self.answer(f"one {url}", url, lambda: [RemoteObject(url, OriginStore(url).version(url))])[0]

    def answer(self, question: str, url: str, ask: Callable[[], list[RemoteObject]]) -> list[RemoteObject]:
        """Returns the objects that a question finds: a new answer, or one that another process has just got.

        Where the origin cannot be reached, the last answer to this question is taken.

        Args:
            question: with the URL; the same for the same objects.
            url: with its secrets, which are not stored.
        """
        if url.startswith("memory:"):  # every process has separate objects there
            return ask()
        asked = time.time()
        memo = self._folder("answers") / ObjectVersion(None, question).key("")
        lock: HeldLock | None = None
        with suppress(OSError):  # the disk is full or read-only
            lock = lock_file(memo.with_suffix(".lock"))
        with lock or nullcontext():
            known = _known(memo, url)
            if known and memo.stat().st_mtime > asked - FRESH:
                return self._renewed(known)
            began = time.time()
            try:
                answer = ask()
            except RunFailed as error:
                if not known:
                    raise
                print(f"{error.problems[0].message}; what it said before is taken", file=sys.stderr)
                return known
            kept = [{"url": without_secrets(each.url), **each.version.plain()} for each in answer]
            if _restored(kept, url) == answer:  # a page may link to addresses with separate signatures
                with suppress(OSError):  # the next process asks the origin
                    replace_file(memo, json.dumps(kept))
                    os.utime(memo, (began, began))
            return self._renewed(answer)

    def _renewed(self, answer: list[RemoteObject]) -> list[RemoteObject]:
        for found in answer:
            self.renew(found)
        return answer

    # -- objects ---------------------------------------------------------------------------------------------

    def entry(self, found: RemoteObject) -> CacheEntry:
        """Returns the entry of an object."""
        return CacheEntry(self._folder("objects") / found.key)

    def renew(self, found: RemoteObject) -> None:
        """Removes content from before this run whose origin, which can be reached, reports no version of it.

        Content in use stays.
        """
        if not found.version.tag and not found.version.checksum:
            entry = self.entry(found)
            if 0 < entry.written() < run_start():
                with cache_errors(entry.folder):
                    entry.remove()

    def begin(self, found: RemoteObject, entry: CacheEntry) -> Download | None:
        """Starts the download of a pinned entry; None if another process downloads it, or it is complete."""
        lock = entry.lock()
        if lock is None:
            return None
        if entry.is_whole:
            lock.close()
            return None
        try:
            room = lambda size: self.make_room(size, url=found.url)  # noqa: E731
            return Download(found.url, found.version, entry, lock, peers=self._feed(found.key), room=room)
        except BaseException:
            lock.close()
            raise

    def fetch(
        self, found: RemoteObject, *, stop: Callable[[], bool] = lambda: False, waits: bool = True
    ) -> tuple[Path, HeldLock]:
        """Downloads an object completely; returns its file and the lock that prevents its eviction.

        Args:
            stop: called repeatedly; once it is true, the file may be incomplete.
            waits: whether its time counts as waiting.

        Raises:
            RunFailed: it cannot be downloaded or stored.
            UserError: it may not be read.
        """
        entry = self.entry(found)
        pin = entry.pin()
        try:
            began = time.monotonic()
            HERE.asked(found.key, whole=entry.is_whole)
            while not entry.is_whole and not stop():
                download = self.begin(found, entry)
                if download is None:
                    time.sleep(POLL)
                    continue
                try:
                    while not download.advance() and not stop():
                        pass
                finally:
                    download.close()
            if waits:
                HERE.add(CacheStats(wait_seconds=time.monotonic() - began))
        except BaseException:
            pin.close()
            raise
        return entry.data, pin

    # -- its size --------------------------------------------------------------------------------------------

    @property
    def limit(self) -> int:
        """Size limit in bytes: the configured one, or `SHARE` of the disk's free space and the cache's own content."""
        with suppress(OSError, ValueError):
            return int((self.root / "limit").read_text())
        return int(SHARE * (shutil.disk_usage(self._folder("objects")).free + self.size()))

    def set_limit(self, size: int | None) -> None:
        """Sets the limit for all processes from now on; None for the default."""
        if size is None:
            (self.root / "limit").unlink(missing_ok=True)
        else:
            self._folder("objects")
            replace_file(self.root / "limit", str(size))

    def size(self) -> int:
        """Bytes that the objects take, counted a few seconds ago at most."""
        with self._counting:
            if time.monotonic() - self._counted > COUNTED:
                self._size = sum(entry.here() for entry in self.entries())
                self._counted = time.monotonic()
            return self._size

    def entries(self) -> Iterator[CacheEntry]:
        """Yields all entries, unordered."""
        return entries(self.root / "objects")

    def make_room(self, size: int, *, url: str = "") -> None:
        """Evicts the least recently used entries until another ``size`` bytes fit within the limit.

        Entries in use are not evicted; if they are too many, the cache exceeds its limit, but never the disk.

        Raises:
            RunFailed: they do not fit on the disk.
        """
        limit = self.limit
        if self.size() + size > limit:
            self._counted = 0.0
            self.shrink(limit - size)
        free = shutil.disk_usage(self._folder("objects")).free
        if size > free:
            message = f"{without_secrets(url)} has {size:,} bytes more to come, and the cache's disk has {free:,} free"
            hint = "free some space, `stoker cache clean`, or set STOKER_CACHE to another folder"
            raise RunFailed(Problem(message, hint, file=str(self.root)))
        with self._counting:
            self._size += size

    def shrink(self, limit: int) -> int:
        """Removes entries, those used least recently first, until all take at most ``limit`` bytes; the bytes freed."""
        lock = lock_file(self._folder("objects").parent / "shrink.lock")
        assert lock is not None
        with lock:
            order = sorted(self.entries(), key=CacheEntry.used)
            sizes = {entry: entry.here() for entry in order}
            total = before = sum(sizes.values())
            for entry in order:
                if total <= limit:
                    break
                if entry.remove():
                    total -= sizes[entry]
        self._counted = 0.0
        return before - total

    def _folder(self, name: str) -> Path:
        folder = self.root / name
        with cache_errors(folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder


def _found(pattern: str) -> list[RemoteObject]:
    """Returns the objects that a URL matches at its origin now."""
    try:
        urls = list(expand_braces(pattern))
    except ValueError as error:
        raise UserError(Problem(f"{without_secrets(pattern)}: {error}", "write {000000..000099}")) from error
    origin = OriginStore(pattern)
    if has_magic(pattern) or pattern.endswith("/"):
        found = {url: version for each in urls for url, version in origin.below(each).items()}
        if not found:
            what = "no object fits" if has_magic(pattern) else "there is no object in"
            raise UserError(Problem(f"{what} {without_secrets(pattern)}", "look at its spelling"))
        return [RemoteObject(url, version) for url, version in found.items()]
    if len(urls) > 1:
        with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
            return [RemoteObject(*pair) for pair in zip(urls, pool.map(origin.version, urls), strict=True)]
    try:
        return [RemoteObject(pattern, origin.version(pattern))]
    except UserError as error:
        # A folder may be written without its slash.
        if isinstance(error.__cause__, FileNotFoundError) and (below := origin.below(f"{pattern}/")):
            return [RemoteObject(url, version) for url, version in below.items()]
        raise


def _known(memo: Path, url: str) -> list[RemoteObject]:
    """Reads a stored answer; empty if there is none."""
    try:
        return _restored(json.loads(memo.read_bytes()), url)
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _restored(kept: list[dict[str, Any]], asked: str) -> list[RemoteObject]:
    """Restores a stored answer, with the passwords and queries of the request, which are not stored."""
    urls = restore_secrets([str(each["url"]) for each in kept], asked)
    return [RemoteObject(url, ObjectVersion.of(each)) for url, each in zip(urls, kept, strict=True)]


@lru_cache(maxsize=8)
def _cache_in(root: Path) -> NodeCache:
    return NodeCache(root)


def node_cache() -> NodeCache:
    """Returns the cache of this machine and user."""
    return _cache_in(cache_folder() / "remote")


def pinned(pins: Sequence[HeldLock]) -> None:
    """Pins entries until this process ends."""
    _PINNED.extend(pins)


_PINNED: list[HeldLock] = []
