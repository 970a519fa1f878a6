"""File of named keys: each line has a name, a role and the SHA-256 of the key; ``#`` starts a comment.

Model servers and the page authenticate callers by such files. The key itself is shown once, when it is created.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from stoker.errors import Problem, UserError, reason_of
from stoker.files import read_file, replace_file

ASK, ADMIN = "ask", "admin"
SERVER_ROLES = (ASK, ADMIN)  # roles of callers of `stoker serve`; an admin may also load adapters and read /metrics
NAME = re.compile(r"[A-Za-z0-9][\w.@-]{0,63}")
_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class NamedKey:
    """A key, identified by its SHA-256 in hexadecimal."""

    name: str
    role: str
    hash: str


def hash_of(key: str) -> str:
    """Returns the SHA-256 of a key, as stored in the file."""
    return hashlib.sha256(key.encode()).hexdigest()


def read_keys(path: Path, roles: Sequence[str], *, option: str, reserved: Sequence[str] = ()) -> tuple[NamedKey, ...]:
    """Reads the keys of a file.

    Args:
        option: command-line option, for messages.
        reserved: names that are not allowed.

    Raises:
        UserError: the file cannot be read, or a line is wrong.
    """
    form = f"write `NAME {'|'.join(roles)} HASH`, where HASH is what `printf %s KEY | sha256sum` prints"
    try:
        lines = read_file(path).decode().splitlines()
    except (OSError, ValueError) as error:
        raise UserError(Problem(f"{option} {path} cannot be read: {error}", form)) from error
    found: dict[str, NamedKey] = {}
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        problem = ""
        if len(words) != 3:
            problem = f"{len(words)} words instead of three"
        elif not NAME.fullmatch(words[0]) or words[0] in reserved:
            problem = f"{words[0]} cannot be a name here"
        elif words[1] not in roles:
            problem = f"{words[1]} is not a role"
        elif not _HASH.fullmatch(words[2]):
            problem = "the third word is not a SHA-256 in hexadecimal"
        elif words[0] in found:
            problem = f"{words[0]} is there twice"
        if problem:
            raise UserError(Problem(problem, form, file=str(path), line=number))
        found[words[0]] = NamedKey(*words)
    return tuple(found.values())


def add_key(path: Path, name: str, role: str, roles: Sequence[str]) -> str:
    """Creates a key and adds its hash to a file, which is created if missing; returns the key.

    Raises:
        UserError: the name is taken or invalid, or the file is wrong.
    """
    with _locked(path):
        check_new_name(path, name, roles)
        text = read_file(path).decode() if path.exists() else ""
        key = secrets.token_urlsafe(32)
        _write(path, f"{text}{'' if text.endswith(chr(10)) or not text else chr(10)}{name} {role} {hash_of(key)}\n")
    return key


def check_new_name(path: Path, name: str, roles: Sequence[str]) -> None:
    """Checks that a key of this name can be added to a file; errors are those of `add_key`."""
    if not NAME.fullmatch(name):
        raise UserError(Problem(f"{name[:80]!r} cannot be the name of a key", "use letters, digits and . _ @ -"))
    if path.exists() and any(key.name == name for key in read_keys(path, roles, option="file")):
        raise UserError(Problem(f"{path} has a key {name} already", "remove it first, or take another name"))


def change_role(path: Path, name: str, role: str, roles: Sequence[str]) -> None:
    """Changes the role of a key.

    Raises:
        UserError: the key does not exist, or the file is wrong.
    """
    _rewrite(path, name, roles, role)


def remove_key(path: Path, name: str, roles: Sequence[str]) -> None:
    """Removes a key from a file; its next request is rejected.

    Raises:
        UserError: the key does not exist, or the file is wrong.
    """
    _rewrite(path, name, roles, None)


def _rewrite(path: Path, name: str, roles: Sequence[str], role: str | None) -> None:
    with _locked(path):
        known = [key.name for key in read_keys(path, roles, option="file")]
        if name not in known:
            raise UserError(Problem(f"{path} has no key {name[:80]}", f"it has {', '.join(known) or 'none'}"))
        lines = []
        for line in read_file(path).decode().splitlines():
            words = line.partition("#")[0].split()
            if not words or words[0] != name:
                lines.append(line)
            elif role is not None:
                lines.append(" ".join((name, role, words[2])) + (f"  #{line.partition('#')[2]}" if "#" in line else ""))
        _write(path, "".join(f"{line}\n" for line in lines))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the lock of a file.

    Raises:
        UserError: its folder cannot be written, or another process has held the lock for ten seconds.
    """
    try:
        held = FileLock(path.with_name(f".{path.name}.lock"), timeout=10).acquire()
    except OSError as error:  # also filelock's Timeout
        raise UserError(f"{path} cannot be locked: {reason_of(error)}") from error
    with held:
        yield


def _write(path: Path, text: str) -> None:
    """Writes the file, readable by its owner only when new; follows a link."""
    real = path.resolve()
    try:
        mode = real.stat().st_mode & 0o777 if real.exists() else 0o600
        replace_file(real, text)
        real.chmod(mode)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {reason_of(error)}") from error


class KeyFile:
    """The current keys of a file: a change applies from the next request on."""

    def __init__(self, path: Path, roles: Sequence[str] = SERVER_ROLES, *, option: str = "--keys") -> None:
        self.path, self._roles, self._option = path, tuple(roles), option
        self._read: tuple[tuple[int, int, int], tuple[NamedKey, ...]] | None = None

    def all(self) -> tuple[NamedKey, ...]:
        """Returns the keys.

        Raises:
            UserError: the file is wrong.
        """
        try:
            found = self.path.stat()
            now = (found.st_mtime_ns, found.st_size, found.st_ino)
        except OSError:
            now = (0, 0, 0)
        if self._read is None or self._read[0] != now:
            self._read = now, read_keys(self.path, self._roles, option=self._option)
        return self._read[1]

    def find(self, key: str) -> NamedKey | None:
        """Returns the entry of a key, in constant time."""
        given, found = hash_of(key), None
        for entry in self.all():
            if hmac.compare_digest(given, entry.hash):
                found = entry
        return found
