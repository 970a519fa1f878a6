"""Restore of the newest readable state: from in-memory copies, or else from disk."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from stoker.checkpoint.dcp_store import Store
from stoker.checkpoint.memory_exchange import fetched
from stoker.checkpoint.memory_restore import MemoryCopies, steps_in_memory
from stoker.checkpoint.object_collectives import by_first, run_on_all_ranks
from stoker.checkpoint.state import Damaged, DamagedError, Places, Restored
from stoker.errors import DiskFailed, RunFailed

SETTLE = 30.0  # timeout in seconds for writers of ended processes to finish, if there is nothing newer
POLL = 0.05  # seconds


def restore_newest(
    store: Store, memory: Path | None, places: Places, *, before: int | None, on_damage: Callable[[Damaged], None]
) -> Restored | None:
    """Restores the newest state; see `stoker.checkpoint.saver.Saver.restore_newest`. A collective.

    Args:
        memory: folder of the in-memory copies; None if there is none.
    """
    copies = steps_in_memory(memory, before)
    steps = _steps_on_disk(store, copies, before)
    candidates: list[MemoryCopies | int] = sorted([*copies, *steps], key=_newness, reverse=True)
    damaged: dict[int, DamagedError] = {}
    torn: OSError | None = None
    for candidate in candidates:
        if isinstance(candidate, MemoryCopies):
            try:
                recalled = _recall(candidate, memory, places)
            except OSError as error:  # something has removed the copies meanwhile
                torn = error
                continue
            if recalled:
                restored = Restored(candidate.step, dict(candidate.numbers), "memory")
                break
        else:
            try:
                numbers = store.restore(candidate, places)
            except DamagedError as error:
                damaged[candidate] = error
            else:
                restored = Restored(candidate, numbers, "disk")
                break
    else:
        if damaged:
            raise RunFailed(
                f"no checkpoint in {store.folder} can be read ({damaged[max(damaged)]}); nothing has been changed. "
                "Put one back from a copy, or write --fresh: it renames this run's folder and trains from the first "
                "step"
            )
        if torn is not None:
            raise RunFailed(f"the copies in memory are gone ({torn}), and there is no checkpoint yet") from torn
        return None
    for step, found in damaged.items():  # not earlier: where none can be restored, the user may repair one
        on_damage(Damaged(step, found, store.put_aside(step)))
    return restored


def _steps_on_disk(store: Store, copies: list[MemoryCopies], before: int | None) -> list[int]:
    """Returns the steps with a checkpoint; none where the place fails, if a rollback has copies in memory instead."""
    newest = max((copy.step for copy in copies), default=-1)
    try:
        by_first(lambda: _settle(store, newest))
        return by_first(lambda: [step for step in store.steps() if before is None or step < before])
    except DiskFailed:
        if before is None or not copies:  # at a start, the disk may have a newer state
            raise
        return []


def _settle(store: Store, newest: int) -> None:
    """Waits for writers of ended processes to finish a checkpoint newer than the existing ones."""
    deadline = time.monotonic() + SETTLE
    while time.monotonic() < deadline:
        there = max([newest, *store.steps()])
        if not any(step > there for step in store.pending()):
            return
        time.sleep(POLL)


def _recall(copy: MemoryCopies, memory: Path | None, places: Places) -> bool:
    """Restores from in-memory copies; returns whether every process found what it needs."""
    known = {name: entry for found in run_on_all_ranks(copy.saved) for name, entry in found.items()}
    held = places(known)
    if all(run_on_all_ranks(lambda: copy.covers(held))):
        run_on_all_ranks(lambda: copy.fill(held))
        return True
    if memory is None:
        return False
    with fetched(copy, memory, held) as more:
        if not all(run_on_all_ranks(lambda: more.covers(held))):
            return False
        run_on_all_ranks(lambda: more.fill(held))
    return True


def _newness(candidate: MemoryCopies | int) -> tuple[int, bool]:
    """Sort key: by step, and at equal steps the in-memory copy first, as it is faster to read."""
    return (candidate, False) if isinstance(candidate, int) else (candidate.step, True)
