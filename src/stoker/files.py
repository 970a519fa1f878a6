"""Writes files atomically, never through a link; reads them without blocking: a FIFO in place of a file is refused."""

from __future__ import annotations

import errno
import json
import os
import select
import stat
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import IO, Any

from stoker.errors import UserError

KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def replace_file(path: Path, data: str | bytes) -> None:
    """Writes a file so that it is either the old one or the new one, whole.

    Raises:
        OSError: it cannot be written; the old one is untouched.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.unlink(missing_ok=True)  # of a process that was killed
        with partial.open("xb") as file:  # made here: an existing file, or a link, is an error
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:  # also a signal
        partial.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file whole or not at all."""
    replace_file(path, json.dumps(value, ensure_ascii=False))


def write_all(file: IO[bytes], data: bytes | memoryview) -> None:
    """Writes all of the data to an unbuffered file: a nearly full disk accepts a part, and the next write raises."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def flush_folder(folder: Path) -> None:
    """Waits until the names of a folder's files are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_name(name: str, is_taken: Callable[[str], bool]) -> str:
    """Returns the first of ``name.1``, ``name.2`` ... that is not taken."""
    return next(one for number in count(1) if not is_taken(one := f"{name}.{number}"))


def irregular(path: Path) -> str:
    """Describes a path that is not a regular file, such as ``a FIFO``; empty for a file, a link to one, or no file."""
    try:
        return _kind(path.stat().st_mode)
    except OSError:
        return "a link to nothing" if path.is_symlink() else ""


def read_file(path: Path) -> bytes:
    """Returns the content of a regular file.

    Raises:
        OSError: it cannot be read, or is not a regular file: opening a FIFO would block.
    """
    with open(path, "rb", opener=open_regular) as file:
        return file.read()


def open_regular(path: str, flags: int) -> int:
    """An opener for `open` that fails immediately for anything but a regular file."""
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0), 0o666)
    if kind := _kind(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"it is {kind}, not a file", path)
    return descriptor


def no_link(path: str, flags: int) -> int:
    """An opener for `open` that fails if the file is a link, or not a regular file."""
    return open_regular(path, flags | getattr(os, "O_NOFOLLOW", 0))


def _kind(mode: int) -> str:
    return "" if stat.S_ISREG(mode) else KINDS.get(stat.S_IFMT(mode), "no regular file")


def unwritable(folder: Path) -> str:
    """Returns why no files can be created in an existing or future folder; empty if they can."""
    there = folder
    while not os.path.lexists(there):
        there = there.parent
    if not there.is_dir():
        return "is not a folder" if there == folder else f"lies below {there}, which is no folder"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"cannot be written: no files can be made in {there}"
    try:
        os.lstat(folder)
    except FileNotFoundError:
        return ""
    except OSError as error:  # such as too long a name
        return f"cannot be made: {error.strerror}"
    return ""


def check_new_folder(to: Path) -> None:
    """Rejects a target of an export that is neither new nor an empty folder.

    Raises:
        UserError: it has content, cannot be made, or is a link, which a folder cannot replace.
    """
    if what := unwritable(to.parent):
        raise UserError(f"{to.parent} {what}: give another --to")
    if to.is_symlink():
        raise UserError(f"{to} is a link: give the folder that it points to")
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UserError(f"{to} exists already: give another --to")


def has_input(descriptor: int, seconds: float | None) -> bool:
    """Waits for bytes of a pipe, or for its end; returns whether there are any.

    Unlike `select.select` it also takes descriptors above 1,023.

    Args:
        seconds: to wait; None for no limit.
    """
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    return bool(waiting.poll(None if seconds is None else seconds * 1000))
