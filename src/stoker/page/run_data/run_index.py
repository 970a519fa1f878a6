"""Runs by id. An id is derived from a folder's path and resolved only through this index: it is not a path."""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from stoker.page.page_error import not_found
from stoker.runs.run_folder import RunFolder

FRESH = 1.0  # seconds for which a look at the disk counts
DEPTH = 6  # folders below one of runs that are looked into
INNER = {
    "checkpoints",
    "logs",
    "tensorboard",
    "wandb",
    "mlflow",
    "chaos",
    "evaluations",
    "rollouts",
}  # of a run: no runs are in them


def id_of(folder: Path) -> str:
    """``quickstart-3f8a92c1d0``: the folder's name and a digest of its path."""
    name = re.sub(r"[^a-z0-9]+", "-", folder.name.lower()).strip("-")[:40] or "run"
    return f"{name}-{hashlib.sha256(os.fsencode(folder)).hexdigest()[:10]}"


class RunIndex:
    """The runs below some folders; links are not followed."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = tuple(roots)
        self._lock = threading.Lock()
        self._known: dict[str, Path] = {}
        self._looked = -FRESH

    def all(self) -> dict[str, RunFolder]:
        """Returns every run, by id."""
        with self._lock:
            if time.monotonic() - self._looked > FRESH:
                self._known = {id_of(path): path for root in self.roots for path in _runs_below(str(root), DEPTH)}
                self._looked = time.monotonic()
            return {key: RunFolder(path) for key, path in self._known.items()}

    def forget(self) -> None:
        """Makes the next question look at the disk."""
        self._looked = -FRESH

    def find(self, key: str) -> RunFolder:
        """Returns the run of an id.

        Raises:
            PageError: there is no such run.
        """
        path = self._known.get(key)
        if path is None or not is_run_file(path / "events.jsonl"):
            path = getattr(self.all().get(key), "path", None)
        if path is None:
            raise not_found("there is no run of this id", "GET /api/runs lists them")
        return RunFolder(path)


def is_run_file(path: Path) -> bool:
    """Returns whether a file of a run exists, and is not a link."""
    return path.is_file() and not path.is_symlink()


def _runs_below(folder: str, depth: int) -> Iterator[Path]:
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    names = {entry.name for entry in entries}
    if "events.jsonl" in names and is_run_file(Path(folder, "events.jsonl")):
        yield Path(folder)
    if not depth:
        return
    for entry in entries:
        if entry.name not in INNER and not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False):
            yield from _runs_below(entry.path, depth - 1)
