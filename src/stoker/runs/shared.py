"""A run's folder in shared memory: what its processes leave there outlives each of them, but not the machine.

owner               process id of the one that holds the run
heart-<rank>        a process' signs of life
rank-<rank>/        its copies of the training state
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

PREFIX = "stoker-"


def shared_folder(run: Path) -> Path:
    """Where the processes of a run on this machine share memory; the same path in all of them.

    Args:
        run: the run's folder.
    """
    place = Path("/dev/shm")
    if not os.access(place, os.W_OK):  # a system without one: the files are then where temporary files are
        place = Path(tempfile.gettempdir())
    path = run.resolve()
    return place / f"{PREFIX}{path.name}-{hashlib.sha256(os.fsencode(path)).hexdigest()[:12]}"


@contextmanager
def shared_memory(run: Path) -> Iterator[Path]:
    """Within it the run has its folder in shared memory, empty at first; the caller holds the run's own folder.

    What runs that were killed left behind is removed too: it would take memory until the machine starts again.
    """
    folder = shared_folder(run)
    _sweep(folder.parent)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    (folder / "owner").write_text(str(os.getpid()))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(place: Path) -> None:
    for owner in place.glob(f"{PREFIX}*/owner"):
        with suppress(OSError, ValueError):
            if not psutil.pid_exists(int(owner.read_text())):
                shutil.rmtree(owner.parent, ignore_errors=True)
