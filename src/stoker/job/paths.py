"""Paths as users write them: relative ones start from a folder, ``~`` is a home folder, ``file://`` is this machine."""

from __future__ import annotations

import re
from pathlib import Path

_HERE = re.compile(r"(file|local)://(?=/)")


def absolute(path: str, base: Path) -> Path:
    """The path below ``base``. The ``~name`` of nobody stays as it is, a name like any other."""
    path = _HERE.sub("", path)
    try:
        return base / Path(path).expanduser()
    except RuntimeError:
        return base / path


def exists(path: Path) -> bool:
    """Whether something lies there; false as well of a path that cannot be, such as one with too long a name."""
    try:
        return path.exists()
    except OSError:
        return False
