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
import os
import shutil
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from stoker.errors import RunFailed

PREFIX, DIGITS = "stoker_", 12  # of a folder's name, and of the digest that ends it
OWN = f"{PREFIX}process-"  # of the folder of a process without a run
KEPT = "kept"
AGAIN = "again"
NEIGHBOUR, SENT, SUPERVISOR, CUT = "neighbour", "sent-", "supervisor", "cut-link"
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
                self.lock = locked(self.path, fcntl.LOCK_SH if beside else fcntl.LOCK_EX)
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


def stamp_of(header: Path) -> str:
    """Identifies a copy by the file of its header, which each copy creates; empty if there is none.

    Stamps are compared for equality only, as the clock may be set back.
    """
    with suppress(FileNotFoundError):
        found = header.stat()
        return f"{found.st_ino} {found.st_mtime_ns}"
    return ""


def locked(path: Path, how: int) -> int | None:
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
