"""Paths as users write them: relative ones start from a folder, and ``~`` is somebody's home."""

from __future__ import annotations

from pathlib import Path


def absolute(path: str, base: Path) -> Path:
    """The path below ``base``. The ``~name`` of nobody stays as it is, a name like any other."""
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
