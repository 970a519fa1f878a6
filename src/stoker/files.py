"""Files written whole, and never through a link that somebody else has put in their place."""

from __future__ import annotations

import os
from pathlib import Path


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
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def no_link(path: str, flags: int) -> int:
    """An opener for `open`: fails where the file is a link."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)
