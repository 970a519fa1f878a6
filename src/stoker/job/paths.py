"""Paths as users write them: relative ones start from a folder, ``~`` is a home folder, ``file://`` is this machine."""

from __future__ import annotations

import re
from pathlib import Path

_HERE = re.compile(r"(file|local)://(?=/)")


def absolute(path: str, base: Path) -> Path:
    """Returns the path below ``base``. ``~name`` of an unknown user is treated as an ordinary file name."""
    path = _HERE.sub("", path)
    try:
        return base / Path(path).expanduser()
    except RuntimeError:
        return base / path


def exists(path: Path) -> bool:
    """Returns whether the path exists; False also for an impossible path, such as one with too long a name."""
    try:
        return path.exists()
    except OSError:
        return False
