"""Settings of a page: the folders that it reads and writes, its address, and its authentication."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from stoker.errors import Problem, UserError
from stoker.units import MIB

BODY = 8 * MIB  # bytes of a request in JSON
STATE_PARTS = ("uploads", "queue", "actions", "jobs", "servers", "stopping")
CHUNK = 64 * MIB  # bytes of one part of an upload
SESSION_SECONDS = 12 * 3600


@dataclass(frozen=True)
class PageSettings:
    """The settings that a page was started with.

    Attributes:
        host: the address to listen on.
        port: of the address; part of the cookie's name, as browsers share cookies between all ports.
        runs: the folders that are searched for runs; new ones are made in the first.
        data: further folders that jobs may read data and models from.
        state: the page's own files: uploads, jobs, the queue, actions, the audit log.
        base: the base of relative paths in jobs: the folder in which `stoker ui` was started.
        token: the single user's login token; None to admit everyone who reaches a loopback address.
        users: the file of users; None with one user or none.
        secure: whether the address is served with TLS.
        urls: prefixes of the URLs that all jobs may name; an admin's jobs may name others.
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
        """Returns whether a user needs a token."""
        return self.token is not None or self.users is not None

    @property
    def uploads(self) -> Path:
        """The folder of uploaded files."""
        return self.state / "uploads"

    def shown(self, path: Path) -> str:
        """Returns a path as a command shows it: relative to `base` if it is below it."""
        return str(path.relative_to(self.base)) if path.is_relative_to(self.base) else str(path)

    def line(self, *words: str | Path) -> str:
        """Returns a command line for a shell, with paths as `shown` gives them."""
        return shlex.join(self.shown(word) if isinstance(word, Path) else word for word in words)


def state_folder(given: Path | None) -> Path:
    """Returns the page's folder of state; creates it with access for its owner only.

    Raises:
        UserError: it cannot be made.
    """
    try:
        home = os.environ.get("XDG_STATE_HOME")
        folder = given or (Path(home) if home else Path("~/.local/state").expanduser()) / "stoker" / "page"
        folder = folder.resolve()
        for part in (folder, *(folder / name for name in STATE_PARTS)):
            part.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
    except (OSError, RuntimeError) as error:
        raise UserError(Problem(f"the page's state cannot be kept: {error}", "give a folder: --state DIR")) from error
    return folder
