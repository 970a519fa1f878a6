"""Runs that were moved aside: each is below ``.removed`` of its folder of runs, beside a file with its former path."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from stoker.files import replace_file
from stoker.page.run_data.stage_views import run_folders
from stoker.runs.run_folder import RunFolder

REMOVED = ".removed"  # below a folder of runs
_NAME = re.compile(r"(.+)@(\d{13,20})")  # of the run, and when it was removed, in nanoseconds


@dataclass(frozen=True)
class RemovedRun:
    """A run that was moved aside.

    Attributes:
        folder: its folder now.
        root: the folder of runs that it is in.
        origin: its former folder.
        time: when it was removed, seconds since 1970.
    """

    folder: Path
    root: Path
    origin: Path
    time: float


def removed_runs(roots: Sequence[Path]) -> list[RemovedRun]:
    """Returns the removed runs of some folders of runs."""
    found = []
    for root in roots:
        for folder in (root / REMOVED).glob("*@*"):
            name = _NAME.fullmatch(folder.name)
            if name and folder.is_dir() and not folder.is_symlink():
                file = _origin_file(folder)
                origin = Path(file.read_text()) if file.is_file() else root / name[1]
                found.append(RemovedRun(folder, root, origin, int(name[2]) / 1e9))
    return found


def place_aside(run: RunFolder, root: Path) -> Path:
    """Returns the folder that a run is moved to when it is removed."""
    return root / REMOVED / f"{run.path.name}@{time.time_ns()}"


def put_aside(run: RunFolder, aside: Path) -> None:
    """Moves a run, or all runs of a job with stages, aside.

    Raises:
        UserError: one of them trains.
    """
    with ExitStack() as taken:
        for each in run_folders(run.path):
            taken.enter_context(each.take())
        aside.parent.mkdir(exist_ok=True)
        replace_file(_origin_file(aside), str(run.path))
        run.path.rename(aside)


def put_back(run: RemovedRun) -> None:
    """Moves a run back to its former folder."""
    run.origin.parent.mkdir(parents=True, exist_ok=True)
    run.folder.rename(run.origin)
    _origin_file(run.folder).unlink(missing_ok=True)


def _origin_file(aside: Path) -> Path:
    return aside.with_name(f"{aside.name}.from")
