"""Opens a store to write to, rolls it back, drops old versions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from stoker.errors import Problem, RunFailed, UserError
from stoker.online_store.lmdb_writer import LmdbWriter
from stoker.online_store.redis_writer import RedisWriter
from stoker.online_store.row_backends import StoreError
from stoker.online_store.store_urls import shown_part, without_secret_parameters

SCHEMES = ("lmdb", "redis", "rediss", "unix")
PACKAGES = ("lmdb", "redis")
StoreWriter = LmdbWriter | RedisWriter


def writer_of(place: str) -> StoreWriter:
    """Opens the store at a URL for writing, and checks that it answers.

    Raises:
        UserError: it cannot be opened, or the package is not installed.
    """
    with store_errors(place, opening=True):
        writer: StoreWriter = LmdbWriter(place) if scheme_of(place) == "lmdb" else RedisWriter(place)
        writer.current()  # a client connects with its first request
        return writer


def existing_store(place: str) -> StoreWriter:
    """Opens an existing store.

    Raises:
        UserError: it does not exist, or cannot be opened.
    """
    scheme = scheme_of(place)
    if not scheme:
        raise UserError(f"{place} is a folder, which has one version: write lmdb://PATH or redis://HOST:PORT/DB")
    if scheme == "lmdb" and not (Path(place.removeprefix("lmdb://")) / "data.mdb").is_file():
        raise UserError(f"there is no store at {place}")
    return writer_of(place)


def scheme_of(place: str) -> str:
    """Returns the scheme of a URL of a store; empty for a folder.

    Raises:
        UserError: it is a URL of something else.
    """
    scheme = place.partition("://")[0] if "://" in place else ""
    if scheme and scheme not in SCHEMES:
        advice = "write a folder, lmdb://PATH or redis://HOST:PORT/DB"
        raise UserError(Problem(f"there is no store of kind {scheme}://", advice))
    return scheme


def roll_back(writer: StoreWriter, to: int | None = None) -> tuple[int, int]:
    """Switches to an earlier version, by default the one before the current one; returns the old and the new version.

    Raises:
        UserError: there is no such version.
    """
    current, numbers = writer.current(), [version.number for version in writer.versions()]
    there = f"there are {', '.join(map(str, numbers))}" if numbers else "it is empty"
    shown = shown_place(writer.place)
    if to is None:
        before = [number for number in numbers if number < current]
        if not before:
            raise UserError(f"{shown} has no version before {current}: {there}")
        to = before[-1]
    elif to not in numbers:
        raise UserError(f"{shown} has no version {to}: {there}")
    writer.switch(to)
    return current, to


def keep_newest(writer: StoreWriter, keep: int) -> list[int]:
    """Drops all versions except the newest ``keep`` and the current one; returns the dropped ones."""
    current, numbers = writer.current(), [version.number for version in writer.versions()]
    dropped = [number for number in numbers[: -keep or None] if number != current]
    for number in dropped:
        writer.drop(number)
    return dropped


def shown_place(place: str) -> str:
    """Returns a folder or URL without its password."""
    if "://" not in place:
        return place
    place = without_secret_parameters(place)
    try:
        parts = urlsplit(place)
    except ValueError:
        return shown_part(place)
    if parts.password is None:
        return place
    return urlunsplit(parts._replace(netloc=f"{parts.username or ''}:***@{parts.netloc.rpartition('@')[2]}"))


@contextmanager
def store_errors(place: str, *, opening: bool = False) -> Iterator[None]:
    """Converts errors of a store to errors for people.

    Args:
        opening: whether the store has not answered before, so that its URL may be wrong.

    Raises:
        UserError: the store cannot be opened or read.
        RunFailed: it failed after it was opened.
    """
    shown = shown_place(place)
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in PACKAGES:
            raise
        raise UserError(Problem(f"{shown} needs {error.name}", f"pip install 'stoker[{error.name}]'")) from error
    except StoreError as error:
        raise UserError(str(error).replace(place, shown)) from error
    except (OSError, ValueError) as error:
        if isinstance(error, (UserError, RunFailed)):
            raise
        raise UserError(f"{shown} cannot be used: {error}".replace(place, shown)) from error
    except Exception as error:
        if type(error).__module__.split(".")[0] not in PACKAGES:
            raise
        if opening:
            message = f"{shown} cannot be opened: {error}".replace(place, shown)
            raise UserError(Problem(message, "check the address, and that the store is running")) from error
        raise RunFailed(f"{shown} failed: {error}".replace(place, shown)) from error
