"""The folder that an export writes, claimed for one process at a time."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

from stoker.errors import Problem, RunFailed, UserError
from stoker.files import check_new_folder
from stoker.node_cache.file_locks import lock_file

NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)  # of a file system that has none


@contextmanager
def claimed_target(to: Path) -> Iterator[None]:
    """Context in which no other export writes to a folder. The lock is the file ``.NAME.lock`` beside it.

    Raises:
        UserError: another process exports to it, or it is not new; see `check_new_folder`.
        RunFailed: the folder above it cannot be made.
    """
    check_new_folder(to)
    path = to.with_name(f".{to.name}.lock")
    made = [folder for folder in to.parents if not folder.exists()]
    try:
        try:
            to.parent.mkdir(parents=True, exist_ok=True)
            lock: AbstractContextManager[object] | None = lock_file(path, wait=False)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise RunFailed(f"the export could not be written to {to}: {error.strerror or error}") from error
            lock = nullcontext()
        if lock is None:
            raise UserError(Problem(f"another export is writing to {to}", "wait for its end, or give another --to"))
        with lock:
            try:
                check_new_folder(to)  # another export may just have ended
                yield
            finally:
                path.unlink(missing_ok=True)
    finally:
        with suppress(OSError):  # the export is there
            for folder in made:
                folder.rmdir()
