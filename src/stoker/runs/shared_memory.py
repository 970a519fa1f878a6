"""The folder in shared memory of a run that trains: empty at first, removed at the end, unless its copies are kept."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from stoker.errors import DiskFailed, Interrupted, RunFailed
from stoker.runs.kept_copies import is_kept, mark_kept, move_kept, newest_step, renamed_run, was_removed
from stoker.runs.run_folder import RunFolder
from stoker.runs.shm_folder import AGAIN, DIGITS, KEPT, OWN, PREFIX, SharedFolder, locked, shared_folder

RESTART = 900.0  # seconds from the last copy within which a launcher may restart the processes


@contextmanager
def shared_memory(run: Path) -> Iterator[SharedFolder]:
    """Gives the run its folder in shared memory; the caller holds the run's own folder.

    It is empty at first and removed at the end. If the run ends because the disk cannot be written, or is stopped
    before it could save a state that is newer than its checkpoints, its copies are kept for the same command.
    Leftovers of killed runs are removed, since they use memory until the machine restarts.
    """
    folder = SharedFolder(shared_folder(run))
    _begin(run, folder)
    with _ending(run, folder):
        yield folder


@contextmanager
def shared_with_others(
    run: Path, *, clears: bool, removes: bool, again: bool, wait: Callable[[], object]
) -> Iterator[None]:
    """Shares a run's folder in shared memory with other processes of a launcher.

    Args:
        clears: whether this process empties the folder first, unless it is kept.
        removes: whether this process removes it at the end.
        again: whether the launcher restarts failed processes: the copies are left for those.
        wait: waits for the other processes.
    """
    folder = SharedFolder(shared_folder(run))
    if clears:
        _begin(run, folder)
        folder.release()
    wait()
    folder.hold(beside=True)
    if again:
        (folder.path / AGAIN).touch()
    with _ending(run, folder, removes=removes, again=again):
        yield


def _begin(run: Path, folder: SharedFolder) -> None:
    """Removes leftovers of killed runs; locks the folder, and empties it unless it is kept."""
    _sweep(folder.path.parent)
    folder.hold()
    if not is_kept(run):
        folder.clear()


@contextmanager
def _ending(run: Path, folder: SharedFolder, *, removes: bool = True, again: bool = False) -> Iterator[None]:
    """Removes, keeps or releases the folder at the end, depending on the exception."""
    left = False
    try:
        yield
    except DiskFailed as error:
        step = newest_step(folder.path)
        if step is None or RunFolder(run).identity() is None:  # nothing that a later command could continue
            raise
        left = True
        raise DiskFailed(f"{error}. {_keep(run, folder, step)}") from error
    except BaseException as error:
        if isinstance(error, Interrupted) and error.keeps and (step := _unsaved(run, folder)) is not None:
            error.add_note(_keep(run, folder, step))
        left = again or is_kept(run)
        raise
    finally:
        if removes and not left:
            folder.remove()
        else:
            folder.release()


def _unsaved(run: Path, folder: SharedFolder) -> int | None:
    """Returns the newest step in a folder if the run's record, which must be here, lists no such checkpoint."""
    step, record = newest_step(folder.path), RunFolder(run)
    if step is None or record.identity() is None or step <= max(record.saved_steps(), default=-1):
        return None
    return step


def _keep(run: Path, folder: SharedFolder, step: int) -> str:
    """Has the copies in a folder stay for the same run; returns the message about it."""
    mark_kept(run, folder)
    return (
        f"Step {step} is kept in this machine's memory ({folder.path}) until the machine restarts: the same command "
        "continues from there"
    )


def _sweep(place: Path) -> None:
    """Removes the folders that no process holds, unless they are kept for a run that was not removed, or a launcher
    may still restart their run.
    """
    of_runs = place.glob(f"{PREFIX}*-{'[0-9a-f]' * DIGITS}")
    for path in (*of_runs, *place.glob(f"{OWN}*")):  # other programs may have folders beside them
        with suppress(OSError, ValueError, RunFailed):  # another process holds it
            if (path / KEPT).exists():
                if (run := renamed_run(path / KEPT)) is not None:
                    move_kept(path, run)
                    continue
                if not was_removed(path / KEPT):
                    continue
            lock = locked(path, fcntl.LOCK_EX)
            if lock is not None:
                newest = max(each.stat().st_mtime for each in (path, *path.glob("rank-*")))
                if not ((path / AGAIN).exists() and time.time() - newest < RESTART):
                    shutil.rmtree(path, ignore_errors=True)
                os.close(lock)
