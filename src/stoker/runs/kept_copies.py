"""Copies of a run's state in shared memory that are kept after the run's end, and follow the run's folder."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from stoker.runs.run_folder import RunFolder
from stoker.runs.shm_folder import KEPT, SharedFolder, has_folder, node_name, shared_folder


def is_kept(run: Path) -> bool:
    """Returns whether a run's shared memory has a state that could not be written to disk."""
    with suppress(OSError, ValueError):
        if has_folder(run):
            text = (shared_folder(run) / KEPT).read_text()
            identity = json.loads(text)["run"] if text.startswith("{") else text  # alone, from earlier versions
            return identity is not None and identity == RunFolder(run).identity()
    return False


def mark_kept(run: Path, folder: SharedFolder) -> None:
    """Has the copies in a folder stay for a run."""
    path = run.resolve()
    found = [(os.lstat(place), place) for place in (path, *path.parents)]
    places = [[status.st_dev, status.st_ino, str(place)] for status, place in found]
    kept = {"run": RunFolder(run).identity(), "places": places, "node": node_name()}
    (folder.path / KEPT).write_text(json.dumps(kept))


def rename_with_memory(run: Path, rename: Callable[[], Path]) -> tuple[Path, int | None]:
    """Renames a run; its kept copies stay those of the run.

    Returns:
        The new path, and the step of the copies; None if none are kept.
    """
    if not is_kept(run):
        return rename(), None
    folder = SharedFolder(shared_folder(run))
    folder.hold()
    try:
        new = rename()
        folder.path = folder.path.rename(shared_folder(new))
        mark_kept(new, folder)
        return new, newest_step(folder.path)
    finally:
        folder.release()


def was_removed(kept: Path) -> bool:
    """Returns whether the run of kept copies was removed.

    It was not if its disk is missing or another container's: the nearest folder above the run that exists is then on
    another disk than the run was, or another folder than when the copies were kept.

    Raises:
        OSError: the disk gives an error, which does not mean that the run was removed.
        ValueError: an earlier version kept them, which did not write where the run was.
    """
    run, *above = json.loads(kept.read_text())["places"]
    for device, number, path in (run, *above):
        with suppress(FileNotFoundError):
            found = os.lstat(path)
            is_same = (found.st_dev, found.st_ino) == (device, number)
            if path == run[-1] and not is_same:  # another run has taken its place
                continue
            return path != run[-1] and is_same and device == run[0]
    return False


def renamed_run(kept: Path) -> Path | None:
    """Returns the folder of the run of kept copies, if it was renamed beside its place, as ``--fresh`` does."""
    record = json.loads(kept.read_text())
    device, number, path = record["places"][0]

    def is_run(place: Path) -> bool:
        with suppress(FileNotFoundError):
            found = os.lstat(place)  # the number of a removed folder may be that of a new one
            return (found.st_dev, found.st_ino) == (device, number) and RunFolder(place).identity() == record["run"]
        return False

    place = Path(path)
    if is_run(place) or not place.parent.is_dir():
        return None
    return next((each for each in place.parent.iterdir() if is_run(each)), None)


def move_kept(folder: Path, run: Path) -> None:
    """Has kept copies follow their run, which another node has renamed."""
    if json.loads((folder / KEPT).read_text()).get("node", "") != node_name():
        return
    held = SharedFolder(folder)
    held.hold(patience=0.0)
    try:
        held.path = folder.rename(shared_folder(run))
        mark_kept(run, held)
    finally:
        held.release()


def newest_step(folder: Path) -> int | None:
    """Returns the newest step with copies to resume from; None if there are none."""
    steps = []
    for header in folder.glob("rank-*/slot-?.json"):
        with suppress(OSError, ValueError):
            facts = json.loads(header.read_text(encoding="utf-8"))
            if "base" not in facts.get("numbers", {}):  # else it adds to a checkpoint; see `checkpoint.storage.BASE`
                steps.append(int(facts["step"]))
    return max(steps, default=None)
