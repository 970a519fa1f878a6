"""Reads the secret that the nodes of a run share."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from stoker.errors import Problem, UserError
from stoker.files import open_regular

LEAST = 32  # bytes
MOST = 4096


def read_secret(path: Path) -> bytes:
    """Reads the secret in a file: at least 32 bytes, or their hexadecimal text.

    Raises:
        UserError: the file cannot be read, others can read it, or it is too short.
    """
    make = f"write `head -c 32 /dev/urandom | xxd -p -c 64 > {path}; chmod 600 {path}`"
    try:
        with open(path, "rb", opener=open_regular) as file:
            found, content = os.fstat(file.fileno()), file.read(MOST + 1)
    except OSError as error:
        raise UserError(Problem(f"--secret {path} cannot be read ({error.strerror})", make)) from error
    if stat.S_IMODE(found.st_mode) & 0o077 or found.st_uid not in (os.getuid(), 0):
        raise UserError(Problem(f"--secret {path} can be read by others than its owner", f"write `chmod 600 {path}`"))
    if len(content) > MOST:
        raise UserError(Problem(f"--secret {path} is longer than {MOST} bytes", make))
    text = content.strip()
    try:
        secret = bytes.fromhex(text.decode("ascii"))
    except ValueError:
        secret = content.rstrip(b"\r\n")
    if len(secret) < LEAST:
        raise UserError(Problem(f"--secret {path} holds {len(secret)} bytes, and at least {LEAST} are needed", make))
    return secret
