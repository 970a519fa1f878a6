"""Disk space for a new checkpoint: selects older ones to delete."""

from __future__ import annotations

import errno
import os
from dataclasses import replace

from stoker.checkpoint.retention import Keep
from stoker.checkpoint.storage import Storage, base_of

SPARE = 1 << 20  # bytes kept free for metrics and events while a checkpoint is written


def make_room(
    storage: Storage,
    step: int,
    size: int,
    keep: Keep,
    *,
    replaces: bool,
    was_full: bool = False,
    base: int | None = None,
) -> tuple[int, ...]:
    """Deletes as few checkpoints as needed, the oldest first; returns their steps.

    Checkpoints kept for another reason than being new stay, and so do the bases of those that stay.

    Args:
        size: bytes of the checkpoint of ``step``.
        replaces: whether the newest one may be deleted too, because the following state is stored elsewhere.
        was_full: whether the checkpoint before did not fit, whatever free space the disk reports: there may be a quota.
        base: the checkpoint that the one of ``step`` adds to.

    Raises:
        OSError: there is too little space even after deleting; nothing has been deleted.
    """
    room, steps = storage.room(), storage.steps()
    missing = size if was_full else 0 if room is None else size + SPARE - room
    if missing <= 0 or step in steps:
        return ()
    may_go = replace(keep, newest=0 if replaces else 1).doomed([other for other in steps if other < step])
    bases = {other: base_of(storage, other) for other in steps} | {step: base} if may_go else {}
    doomed: list[int] = []
    while (older := next((one for one in may_go if one not in bases.values()), None)) is not None:
        may_go.remove(older)
        del bases[older]  # its base may be deletable now
        doomed.append(older)
        missing -= sum(storage.sizes(older).values())
        if missing <= 0:
            for each in sorted(doomed, reverse=True):
                storage.delete(each)
            return tuple(sorted(doomed))
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
