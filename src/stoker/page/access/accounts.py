"""Users of the page: roles, tokens and sessions.

A session is a cookie that the server has signed; the server stores only the sessions that were ended early. The cookie
contains its user and its expiry, and is valid while that user's token is unchanged, so sessions survive a restart.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from stoker.errors import Problem, UserError
from stoker.files import no_link, read_file, replace_file
from stoker.page.page_settings import SESSION_SECONDS, PageSettings
from stoker.serve.named_keys import hash_of, read_keys

ROLES = ("see", "run", "admin")  # each may do what those before it may
LOCAL = "local"  # the user of a page without a token
OWNER = "owner"  # the user of a page with one token
KEY_BYTES = 32


@dataclass(frozen=True)
class Account:
    """A user.

    Attributes:
        role: one of `ROLES`.
        hash: SHA-256 of the token, hexadecimal; empty without one.
    """

    name: str
    role: str
    hash: str

    def may(self, role: str) -> bool:
        """Returns whether the user has the rights of a role."""
        return ROLES.index(self.role) >= ROLES.index(role)


@dataclass(frozen=True)
class Session:
    """A user who is logged in.

    Attributes:
        id: of the session; part of its CSRF value.
        until: when it ends, seconds since 1970.
    """

    account: Account
    id: str
    until: float


def read_users(path: Path) -> tuple[Account, ...]:
    """Returns the users of a file: a line each with name, role and SHA-256 of the token; ``#`` begins a comment.

    Raises:
        UserError: the file cannot be read, or a line is wrong.
    """
    found = read_keys(path, ROLES, option="--users", reserved=(LOCAL, OWNER))
    if not found:
        raise UserError(Problem(f"--users {path} contains no users", f"stoker keys {path} --add NAME --role admin"))
    return tuple(Account(key.name, key.role, key.hash) for key in found)


class Accounts:
    """Admits users, and recognises their sessions."""

    def __init__(self, settings: PageSettings) -> None:
        self._settings = settings
        self._key = _kept_key(settings.state / "session.key")
        self._ended_file = settings.state / "ended_sessions.json"
        self._ended = _read_ended(self._ended_file)
        self._read: tuple[tuple[int, int], tuple[Account, ...]] | None = None

    def all(self) -> tuple[Account, ...]:
        """Returns the current users: a changed file is read by the next request.

        Raises:
            UserError: the file is invalid.
        """
        if self._settings.users is not None:
            found = self._settings.users.stat() if self._settings.users.is_file() else None
            key = (found.st_mtime_ns, found.st_size) if found else (0, 0)
            if self._read is None or self._read[0] != key:
                self._read = key, read_users(self._settings.users)
            return self._read[1]
        if self._settings.token is not None:
            return (Account(OWNER, "admin", hash_of(self._settings.token)),)
        return (Account(LOCAL, "admin", ""),)

    @property
    def admitted(self) -> Account | None:
        """The user of requests without a session; None if a login is demanded."""
        return None if self._settings.demands_login else self.all()[0]

    def of_token(self, token: str) -> Account | None:
        """Returns the user whom a token belongs to; takes as long for any token."""
        given = hash_of(token)
        found = None
        for account in self.all():
            if account.hash and hmac.compare_digest(given, account.hash):
                found = account
        return found

    def begin(self, account: Account) -> tuple[Session, str]:
        """Returns a session for a user, and its cookie."""
        session = Session(account, secrets.token_hex(16), time.time() + SESSION_SECONDS)
        body = f"{account.name}|{session.id}|{session.until:.0f}"
        text = f"{body}|{self._sign('session', body, account.hash)}"
        return session, base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")

    def session_of(self, cookie: str) -> Session | None:
        """Returns the session of a cookie; None if it is invalid or expired, or its user lost this token."""
        try:
            text = base64.urlsafe_b64decode(cookie + "=" * (-len(cookie) % 4)).decode()
            name, number, until, signature = text.split("|")
            ends = float(until)
        except ValueError:
            return None
        account = next((each for each in self.all() if each.name == name), None)
        expected = self._sign("session", f"{name}|{number}|{until}", account.hash if account else "")
        if not hmac.compare_digest(signature.encode(), expected.encode()) or account is None:
            return None
        if not time.time() < ends or number in self._ended:
            return None
        return Session(account, number, ends)

    def csrf_of(self, session: Session) -> str:
        """Returns the CSRF token of a session, which requests that change something must repeat."""
        return self._sign("csrf", session.id, session.account.hash)

    def end(self, session: Session) -> None:
        """Ends a session before its time."""
        now = time.time()
        self._ended = {number: until for number, until in self._ended.items() if until > now}
        self._ended[session.id] = session.until
        replace_file(self._ended_file, json.dumps(self._ended))

    def _sign(self, *parts: str) -> str:
        return hmac.new(self._key, json.dumps(parts).encode(), hashlib.sha256).hexdigest()


def _kept_key(path: Path) -> bytes:
    """Returns the key that signs sessions, created once; replacing a damaged key ends all sessions."""
    try:
        key = read_file(path)
        if len(key) == KEY_BYTES:
            return key
    except OSError:
        pass
    key = secrets.token_bytes(KEY_BYTES)
    path.unlink(missing_ok=True)
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(key)
    return key


def _read_ended(path: Path) -> dict[str, float]:
    try:
        with open(path, "rb", opener=no_link) as file:
            return {str(number): float(until) for number, until in json.loads(file.read()).items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
