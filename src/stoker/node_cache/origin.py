"""The store of a URL, by fsspec: lists objects, and streams an object's bytes from an offset."""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Any, TypeVar

from stoker.errors import Problem, RunFailed, UserError, reason_of
from stoker.node_cache.object_version import ObjectVersion
from stoker.node_cache.urls import WEB, has_magic, name_of, scheme_of, url_problem, without_secrets

PIECE = 8 * 2**20  # bytes of a request
WINDOW = 4  # concurrent requests, if the library supports them
CONNECT, SILENCE = 30.0, 60.0  # timeouts in seconds of a connection, and between bytes
SOON = 0.1  # seconds after which a reader gets the bytes so far, however few
TRIES = 4  # attempts of a query, before the origin counts as unreachable
WAIT = 0.5  # seconds before the second of them, doubled before each further one
PATIENCE = 30.0  # seconds after which there is no further attempt; some libraries repeat requests themselves
NONE_SUCH = ("NoSuchBucket", "NoSuchKey", "404")
REFUSED, MISSING = (401, 403, 407), (404, 410)  # status codes
_MD5 = re.compile(r"[0-9a-f]{32}")

Result = TypeVar("Result")


class Broken(OSError):
    """The bytes of an object ended before their end."""


class OriginStore:
    """The store of a URL.

    Raises:
        UserError: no library can open such a URL.
    """

    def __init__(self, url: str) -> None:
        if problem := url_problem(url):
            raise UserError(Problem(*problem))
        self.scheme, self._place = scheme_of(url), _place_of(url)
        self._system = _file_system(self.scheme, self._place)

    def version(self, url: str) -> ObjectVersion:
        """Returns the current version of an object.

        Raises:
            UserError: there is no such object, or this user may not read it.
            RunFailed: the origin cannot be reached.
        """
        info = self._asked(url, lambda: self._system.info(self._path(url)))
        if info.get("type") == "directory":
            problem = Problem(f"{without_secrets(url)} is a folder, not an object", "name an object in it")
            raise UserError(problem) from FileNotFoundError(url)
        return ObjectVersion.of_info(info)

    def below(self, url: str) -> dict[str, ObjectVersion]:
        """Lists the objects and folders in a folder by URL, or those that match a pattern, sorted.

        Raises:
            UserError: this user may not list them.
            RunFailed: the origin cannot be reached.
        """
        path = self._path(url)
        try:
            if has_magic(url):
                found = self._asked(url, lambda: self._system.glob(path, detail=True))
            else:
                found = self._asked(url, lambda: self._system.find(path.rstrip("/") + "/", detail=True))
        except UserError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return {}
            raise
        files = {self._url(name): info for name, info in found.items() if info.get("type") != "directory"}
        if self.scheme in WEB:  # a page of links does not describe their targets
            return {each: self.version(each) for each in sorted(files)}
        return {each: ObjectVersion.of_info(files[each]) for each in sorted(files)}

    def checksum(self, url: str, version: ObjectVersion) -> str:
        """Returns an object's checksum if it needs a separate request; empty if there is none.

        An S3 store's entity tag is the MD5 of an object uploaded in one part, unless a key encrypts it.
        """
        tag = version.tag.removeprefix("tag ")
        if self.scheme not in ("s3", "s3a") or not _MD5.fullmatch(tag):
            return version.checksum
        bucket, key, _ = self._system.split_path(self._path(url))
        head = self._asked(url, lambda: self._system.call_s3("head_object", Bucket=bucket, Key=key))
        plain = head.get("ServerSideEncryption") in (None, "AES256") and not head.get("SSECustomerAlgorithm")
        return f"md5:{tag}" if plain and str(head.get("ETag", "")).strip('"') == tag else ""

    def pieces(self, url: str, version: ObjectVersion, start: int) -> Iterator[bytes]:
        """Yields the bytes from ``start`` on, in order.

        Raises:
            OSError: they end early, or the origin cannot be reached.
        """
        try:
            if self.scheme in WEB:
                yield from self._streamed(url, start)
            elif version.size is None:
                with self._system.open(self._path(url), "rb") as file:
                    file.seek(start)
                    while piece := file.read(PIECE):
                        yield piece
            else:
                yield from self._requested(url, version.size, start)
        except (OSError, UserError):
            raise
        except Exception as error:  # libraries raise their own errors
            raise Broken(reason_of(error) or type(error).__name__) from error

    def _requested(self, url: str, size: int, start: int) -> Iterator[bytes]:
        """Streams by one request for each piece, several of them ahead."""
        path = self._path(url)
        window = WINDOW if self._system.async_impl else 1
        with ThreadPoolExecutor(window, "stoker-origin") as pool:
            waiting: deque[tuple[Future[bytes], int]] = deque()
            at = start
            try:
                while at < size or waiting:
                    while at < size and len(waiting) < window:
                        end = min(size, at + PIECE)
                        waiting.append((pool.submit(self._system.cat_file, path, start=at, end=end), end - at))
                        at = end
                    future, length = waiting.popleft()
                    piece = bytes(future.result())
                    if len(piece) != length:
                        raise Broken(f"{len(piece)} bytes came where {length} were asked for")
                    yield piece
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def _streamed(self, url: str, start: int) -> Iterator[bytes]:
        """Streams by one request for the rest. A server without support for ranges sends the beginning again."""
        from fsspec.asyn import sync

        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
        # A size is passed so that it is not requested again.
        file = self._system.open(url, "rb", block_size=0, size=1, headers=headers)
        try:
            answer = file.r
            if "Content-Length" not in answer.headers and "chunked" not in answer.headers.get("Transfer-Encoding", ""):
                raise _no_length(url)
            skip = start if start and answer.status != 206 else 0

            async def piece() -> bytes:
                parts: list[bytes] = []
                size, until = 0, time.monotonic() + SOON
                while size < PIECE // 4 and (not parts or time.monotonic() < until):
                    try:
                        part = await answer.content.readany()
                    except Exception:
                        if parts:  # it is raised again by the next read
                            break
                        raise
                    if not part:
                        break
                    parts.append(part)
                    size += len(part)
                return b"".join(parts)

            while found := sync(self._system.loop, piece):
                if skip:
                    found, skip = found[skip:], max(0, skip - len(found))
                if found:
                    yield found
        finally:
            file.close()

    def _asked(self, url: str, question: Callable[[], Result]) -> Result:
        """Sends a query, and repeats it while the origin cannot be reached."""
        until = time.monotonic() + PATIENCE
        for again in range(TRIES):
            try:
                return question()
            except UserError:
                raise
            except Exception as raised:
                error = _what_happened(raised)
                if isinstance(error, FileNotFoundError):
                    raise UserError(Problem(f"there is no object {without_secrets(url)}", _where(url))) from error
                if _is_refused(error):
                    message = f"{without_secrets(url)} may not be read: {reason_of(error)}"
                    raise UserError(Problem(message, _credentials(self.scheme))) from error
                if again + 1 == TRIES or time.monotonic() > until:
                    raise RunFailed(Problem(f"{without_secrets(url)} cannot be reached: {reason_of(error)}")) from error
            time.sleep(WAIT * 2**again)
        raise AssertionError

    def _path(self, url: str) -> str:
        return str(self._system._strip_protocol(url)) if self.scheme not in WEB else url

    def _url(self, path: str) -> str:
        """Returns the URL of a name in a listing, which may omit the host or the bucket."""
        if "://" in path:
            return path
        host, path = self._place.partition("://")[2], path.lstrip("/")
        return f"{self.scheme}://{path}" if path.startswith(f"{host}/") else f"{self._place}/{path}"


@lru_cache(maxsize=64)
def _file_system(scheme: str, place: str) -> Any:
    """Returns the file system of a scheme; one per host for schemes with connections to hosts."""
    from fsspec.core import url_to_fs

    options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
    if scheme in WEB:
        from aiohttp import ClientTimeout

        timeout = ClientTimeout(total=None, connect=CONNECT, sock_read=SILENCE)
        options["client_kwargs"] = {"timeout": timeout, "trust_env": True}
    if scheme == "memory":
        options = {}
    system = url_to_fs(place, **options)[0]
    logger = logging.getLogger(type(system).__module__.partition(".")[0])
    if logger.level == logging.NOTSET:  # its errors are raised too; gcsfs also logs them with tracebacks
        logger.setLevel(logging.CRITICAL)
    return system


def _place_of(url: str) -> str:
    """Returns the URL without the object's path: its host may matter (hdfs, sftp), its path does not."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://" if scheme.lower() in WEB else f"{scheme}://{rest.partition('/')[0]}"


def _what_happened(error: Exception) -> Exception:
    """Returns the cause of an fsspec error: for an unreachable web server, fsspec reports a missing file."""
    cause = error.__cause__
    if isinstance(error, FileNotFoundError) and isinstance(cause, Exception) and "aiohttp" in type(cause).__module__:
        return error if getattr(cause, "status", None) in MISSING else cause
    answer = getattr(error, "response", None)  # of S3
    if isinstance(answer, Mapping) and answer.get("Error", {}).get("Code") in NONE_SUCH:
        return FileNotFoundError(str(error))
    return error


def _is_refused(error: Exception) -> bool:
    status = getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
    return isinstance(error, PermissionError) or status in REFUSED or "Credentials" in type(error).__name__


def _credentials(scheme: str) -> str:
    if scheme in ("s3", "s3a"):
        return "give credentials as for the AWS command line: a profile, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    return "give credentials as the store's own tools take them, or by fsspec's configuration files"


def _where(url: str) -> str:
    return "look at its spelling" if name_of(url) else "name an object, a folder or a pattern"


def _no_length(url: str) -> UserError:
    shown = without_secrets(url)
    message = f"{shown}: its server does not say how long it is, so that a truncated answer could not be noticed"
    return UserError(Problem(message, "copy it to a store, or to a server that gives the length"))
