"""Files that a path, a pattern or a folder may match."""

from __future__ import annotations

import glob
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

from stoker.job.paths import absolute, exists


def candidate_files(name: str, base: Path) -> list[Path]:
    """Returns every file that a path may match, sorted, without hidden ones."""
    path = absolute(name, base)
    found: Iterable[Path] = [path]
    if exists(path) and path.is_dir():
        found = (p for p in path.rglob("*") if not any(s.startswith(".") for s in p.relative_to(path).parts))
    elif not exists(path):
        pattern = str(Path(name).expanduser()) if name.startswith("~/") else name
        found = (base / p for p in _glob(pattern, base))
    return sorted({p for p in found if p.is_file()}, key=lambda p: p.as_posix())


def _glob(pattern: str, base: Path) -> Iterator[str]:
    """Yields the matches of a pattern. Links to a folder above themselves are not followed, unlike in `glob`."""
    parts = [part for part, after in itertools.pairwise([*pattern.split("/"), ""]) if not part == after == "**"]
    if "**" not in parts:
        yield from glob.iglob(pattern, root_dir=base)  # noqa: PTH207 -- Path.glob takes no absolute pattern
        return
    at = parts.index("**")
    head, tail = "/".join(parts[:at]) or "/", "/".join(parts[at + 1 :]) or "*"
    for start in glob.iglob(head, root_dir=base) if at else [""]:  # noqa: PTH207
        for folder in _folders((base / start).absolute(), frozenset()):
            yield from _glob(f"{glob.escape(str(folder))}/{tail}", base)


def _folders(folder: Path, above: frozenset[tuple[int, int]]) -> Iterator[Path]:
    """Yields a folder and all below it, hidden ones left out, those outside of ``above`` (device, inode)."""
    try:
        status = folder.stat()
        here = (status.st_dev, status.st_ino)
        if here in above:
            return
        yield folder
        below = sorted(path for path in folder.iterdir() if not path.name.startswith(".") and path.is_dir())
    except OSError:  # it may not be read, or it is gone
        return
    for path in below:
        yield from _folders(path, above | {here})
