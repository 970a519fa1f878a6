"""A run's folder in shared memory: its files outlive the processes of the run, but not the machine.

heart-<rank>        the heartbeat of a process
gpu-<rank>          the PCI address of its GPU, for NVIDIA's
rank-<rank>/        its copies of the training state
kept                if the copies are kept after the run's end: the run that they belong to, where it was, and the node
neighbour           exists while the next of several nodes stores copies, too
sent-<rank>         the stamp of a rank's newest copy that the next node has; see `stamp_of`
supervisor          process id of the node's supervisor
cut-link            asks the supervisor to cut its node off, for a number of seconds; see `stoker chaos`
again               if a launcher restarts the processes, and no process holds the folder meanwhile

A process holds the folder by a lock on it. The lock ends with its process, in whatever way, and works across
containers, where process ids differ.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from stoker.errors import DiskFailed, Interrupted, RunFailed
from stoker.runs.run_folder import RunFolder

PREFIX, DIGITS = "stoker_", 12  # of a folder's name, and of the digest that ends it
OWN = f"{PREFIX}process-"  # of the folder of a process without a run
KEPT = "kept"
AGAIN = "again"
NEIGHBOUR, SENT, SUPERVISOR, CUT = "neighbour", "sent-", "supervisor", "cut-link"
RESTART = 900.0  # seconds from the last copy within which a launcher may restart the processes
PATIENCE = 10.0  # seconds
POLL = 0.02  # seconds
_node = [""]  # of this process


def set_node_name(name: str) -> None:
    """Sets the node that this process belongs to: several nodes on one machine each have a folder."""
    _node[0] = name


def node_name() -> str:
    """Returns the name that `set_node_name` was given; empty for none."""
    return _node[0]


def shared_folder(run: Path) -> Path:
    """Returns the folder in which the processes of a run on this machine share memory.

    Args:
        run: the run's folder. A folder at the same path in another container has another shared folder.
    """
    place = Path("/dev/shm")
    if not os.access(place, os.W_OK):  # a system without it: the files are then in the folder of temporary files
        place = Path(tempfile.gettempdir())
    path = run.resolve()
    identity = os.fsencode(path)
    with suppress(FileNotFoundError):
        found = path.stat()
        identity += f" {found.st_dev} {found.st_ino}".encode()
    if node_name():
        identity += f" node {node_name()}".encode()
    return place / f"{PREFIX}{path.name}-{hashlib.sha256(identity).hexdigest()[:DIGITS]}"


def has_folder(run: Path) -> bool:
    """Returns whether a run has its folder in shared memory, made by this user and writable by no other."""
    try:
        found = shared_folder(run).lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


class SharedFolder:
    """A folder in shared memory that this process holds."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock: int | None = None

    def hold(self, *, beside: bool = False, patience: float = PATIENCE) -> None:
        """Locks the folder, and creates it if it is missing.

        Args:
            beside: whether the lock is shared with other processes.
            patience: seconds to wait for others; a clean-up of leftovers holds the lock for a moment.

        Raises:
            RunFailed: others hold the lock, or it belongs to another user.
        """
        deadline = time.monotonic() + patience
        while self.lock is None:
            try:
                self.path.mkdir(mode=0o700, exist_ok=True)
                self.lock = _locked(self.path, fcntl.LOCK_SH if beside else fcntl.LOCK_EX)
            except OSError as error:  # a link or a file in its place
                raise RunFailed(f"{self.path} cannot be used ({error.strerror}); remove it") from error
            if self.lock is None:
                if time.monotonic() > deadline:
                    raise RunFailed(f"another process holds {self.path}; end it, or give another `output`")
                time.sleep(POLL)
        if os.fstat(self.lock).st_uid != os.getuid():
            self.release()
            raise RunFailed(f"{self.path} belongs to another user; remove it, or give another `output`")

    def keep(self) -> None:
        """Creates the folder again where something has removed it."""
        with suppress(FileNotFoundError):
            if self.lock is not None and self.path.stat().st_ino == os.fstat(self.lock).st_ino:
                return
        self.release()
        self.hold()

    def clear(self) -> None:
        """Removes its content."""
        for path in self.path.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    def release(self) -> None:
        """Releases the lock."""
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None

    def remove(self) -> None:
        """Removes the folder and releases the lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.release()


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
        step = _newest(folder.path)
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
    step, record = _newest(folder.path), RunFolder(run)
    if step is None or record.identity() is None or step <= max(record.saved_steps(), default=-1):
        return None
    return step


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
        _mark_kept(new, folder)
        return new, _newest(folder.path)
    finally:
        folder.release()


def _mark_kept(run: Path, folder: SharedFolder) -> None:
    """Has the copies in a folder stay for a run."""
    path = run.resolve()
    found = [(os.lstat(place), place) for place in (path, *path.parents)]
    places = [[status.st_dev, status.st_ino, str(place)] for status, place in found]
    kept = {"run": RunFolder(run).identity(), "places": places, "node": node_name()}
    (folder.path / KEPT).write_text(json.dumps(kept))


def _keep(run: Path, folder: SharedFolder, step: int) -> str:
    """Has the copies in a folder stay for the same run; returns the message about it."""
    _mark_kept(run, folder)
    return (
        f"Step {step} is kept in this machine's memory ({folder.path}) until the machine restarts: the same command "
        "continues from there"
    )


def stamp_of(header: Path) -> str:
    """Identifies a copy by the file of its header, which each copy creates; empty if there is none.

    Stamps are compared for equality only, as the clock may be set back.
    """
    with suppress(FileNotFoundError):
        found = header.stat()
        return f"{found.st_ino} {found.st_mtime_ns}"
    return ""


def is_kept(run: Path) -> bool:
    """Returns whether a run's shared memory has a state that could not be written to disk."""
    with suppress(OSError, ValueError):
        if has_folder(run):
            text = (shared_folder(run) / KEPT).read_text()
            identity = json.loads(text)["run"] if text.startswith("{") else text  # alone, from earlier versions
            return identity is not None and identity == RunFolder(run).identity()
    return False


def _was_removed(kept: Path) -> bool:
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


def _renamed(kept: Path) -> Path | None:
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


def _move(folder: Path, run: Path) -> None:
    """Has kept copies follow their run, which another node has renamed."""
    if json.loads((folder / KEPT).read_text()).get("node", "") != node_name():
        return
    held = SharedFolder(folder)
    held.hold(patience=0.0)
    try:
        held.path = folder.rename(shared_folder(run))
        _mark_kept(run, held)
    finally:
        held.release()


def _newest(folder: Path) -> int | None:
    """Returns the newest step with copies to resume from; None if there are none."""
    steps = []
    for header in folder.glob("rank-*/slot-?.json"):
        with suppress(OSError, ValueError):
            facts = json.loads(header.read_text(encoding="utf-8"))
            if "base" not in facts.get("numbers", {}):  # else it adds to a checkpoint; see `checkpoint.storage.BASE`
                steps.append(int(facts["step"]))
    return max(steps, default=None)


def _locked(path: Path, how: int) -> int | None:
    """Opens and locks a folder; returns its descriptor, or None if others have locked it, or it is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    with suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
        if path.stat().st_ino == os.fstat(descriptor).st_ino:  # else it was removed before it was locked
            return descriptor
    os.close(descriptor)
    return None


def _sweep(place: Path) -> None:
    """Removes the folders that no process holds, unless they are kept for a run that was not removed, or a launcher
    may still restart their run.
    """
    of_runs = place.glob(f"{PREFIX}*-{'[0-9a-f]' * DIGITS}")
    for path in (*of_runs, *place.glob(f"{OWN}*")):  # other programs may have folders beside them
        with suppress(OSError, ValueError, RunFailed):  # another process holds it
            if (path / KEPT).exists():
                if (run := _renamed(path / KEPT)) is not None:
                    _move(path, run)
                    continue
                if not _was_removed(path / KEPT):
                    continue
            lock = _locked(path, fcntl.LOCK_EX)
            if lock is not None:
                newest = max(each.stat().st_mtime for each in (path, *path.glob("rank-*")))
                if not ((path / AGAIN).exists() and time.time() - newest < RESTART):
                    shutil.rmtree(path, ignore_errors=True)
                os.close(lock)
