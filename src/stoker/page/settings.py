"""What a page was started with: the folders that it reads and writes, its address, and how users are recognised."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from stoker.errors import Problem, UserError

MIB = 1 << 20
BODY = 8 * MIB  # bytes of a request in JSON
CHUNK = 64 * MIB  # bytes of one part of an upload
SESSION_SECONDS = 12 * 3600


@dataclass(frozen=True)
class PageSettings:
    """What a page was started with.

    Attributes:
        host: the address that is listened on.
        port: of the address; part of the cookie's name, as browsers keep one set of cookies for all ports.
        runs: the folders that are searched for runs; new ones are made in the first.
        data: further folders that jobs may read data and models from.
        state: what the page keeps: uploads, jobs, the queue, actions, the audit log.
        base: where relative paths of jobs begin: the folder in which `stoker ui` was started.
        token: what the only user sends to log in; None where everyone who reaches a loopback address is admitted.
        users: the file of users; None with one user or none.
        secure: whether the address is served with TLS.
        urls: how the addresses of stores begin that all jobs may name; those that an admin writes may name others.
    """

    host: str
    port: int
    runs: tuple[Path, ...]
    data: tuple[Path, ...]
    state: Path
    base: Path
    token: str | None = None
    users: Path | None = None
    secure: bool = False
    urls: tuple[str, ...] = ()

    @property
    def demands_login(self) -> bool:
        """Whether a user has to show a token."""
        return self.token is not None or self.users is not None

    @property
    def uploads(self) -> Path:
        """The folder of uploaded files."""
        return self.state / "uploads"


def state_folder(given: Path | None) -> Path:
    """The page's folder of state, made where it is missing, for its owner alone.

    Raises:
        UserError: it cannot be made.
    """
    try:
        home = os.environ.get("XDG_STATE_HOME")
        folder = given or (Path(home) if home else Path("~/.local/state").expanduser()) / "stoker" / "page"
        folder = folder.resolve()
        for part in (folder, *(folder / name for name in ("uploads", "queue", "actions", "jobs", "servers"))):
            part.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
    except (OSError, RuntimeError) as error:
        raise UserError(Problem(f"the page's state cannot be kept: {error}", "give a folder: --state DIR")) from error
    return folder
