"""Paths as users write them: relative ones start from a folder, ``~`` is a home folder, ``file://`` is this machine."""

from __future__ import annotations

import re
from difflib import get_close_matches
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


def similar_name(name: str, folder: Path) -> str:
    """Returns the name in a folder that is most like ``name``, or an empty string; one with other numbers is not."""
    try:
        names = {path.name for path in folder.iterdir()}
    except OSError:
        return ""
    near = get_close_matches(name, sorted(names), 1, 0.7)
    return near[0] if near and re.findall(r"\d+", near[0]) == re.findall(r"\d+", name) else ""


def nearest_name(path: str, base: Path) -> str:
    """Returns the path below ``base`` that is most like a missing one, or the name in ``base`` most like its last part.

    Empty if none is similar.
    """
    found = Path()
    for part in Path(path).parts:
        near = similar_name(part, base / found)
        if not near:
            return similar_name(Path(path).name, base)
        found /= near
    return str(found)
