"""Reads the token of a server from a file that only its owner can read, or from a mounted secret."""

from __future__ import annotations

import os
from pathlib import Path

from stoker.errors import Problem, UserError, reason_of

LEAST_TOKEN = 16  # characters
MOST_BYTES = 4096


def read_token(path: Path, option: str) -> str:
    """Returns the token in a file.

    Args:
        option: that named the file, for messages.

    Raises:
        UserError: it cannot be read, others can read it, or it is too short. A file on a read-only mount may have any
            mode: Kubernetes and Docker mount secrets so, and nobody can change it there.
    """
    try:
        with path.open("rb") as file:
            mode, mount = os.fstat(file.fileno()).st_mode, os.fstatvfs(file.fileno())
            token = file.read(MOST_BYTES).decode().strip()
    except (OSError, ValueError) as error:
        raise UserError(f"{option} {path} cannot be read: {reason_of(error)}") from error
    if mode & 0o077 and not mount.f_flag & os.ST_RDONLY:
        raise UserError(Problem(f"{option} {path} can be read by others than its owner", f"write `chmod 600 {path}`"))
    check_token(token, f"(umask 077; python -c 'import secrets; print(secrets.token_urlsafe())' > {path})")
    return token


def check_token(token: str, make: str) -> None:
    """Raises UserError for a token that is too short, or has characters that a header cannot contain.

    Args:
        make: a command that makes a token.
    """
    if len(token) < LEAST_TOKEN or not token.isascii() or not token.isprintable():
        what = f"the token must be at least {LEAST_TOKEN} printable ASCII characters"
        raise UserError(Problem(what, f"make one with: {make}"))
