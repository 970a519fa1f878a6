"""How a run saves itself: in the background while it goes on, for good at its end; what became of it, as events."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from stoker.checkpoint.saver import Saver
from stoker.checkpoint.state import Damaged, Places, Restored, State
from stoker.checkpoint.storage import Keep
from stoker.errors import DiskFailed, RunFailed

StateOf = Callable[[], State]


class Saving:
    """Saves and restores a run, and records it.

    Attributes:
        stall: seconds that training has waited for it, until someone sets them back.

    Args:
        event: records what happened, once for all processes.
        note: tells the user.
    """

    def __init__(self, saver: Saver, event: Callable[..., None], note: Callable[[str], None]) -> None:
        self._saver, self._event, self._note = saver, event, note
        self.stall = 0.0
        self._saved: int | None = None  # newest step whose checkpoint is there, or is being written

    def restore(self, places: Places, *, before: int | None = None) -> Restored | None:
        """Restores the newest state of a step before another; None where there is none.

        A damaged checkpoint is put aside, and the one before it is taken.

        Raises:
            RunFailed: none of the checkpoints can be read.
        """
        restored = self._saver.restore_newest(places, before=before, on_damage=self._tell_damaged)
        self._saved = restored.step if restored is not None and restored.where == "disk" else None
        return restored

    def remember(self, state: StateOf) -> None:
        """Copies the state in memory, for a restart."""
        with self._stalled():
            self._saver.remember(state())

    def save(self, step: int, state: StateOf, keep: Keep) -> None:
        """Saves in the background. What goes wrong does not end the run: the next checkpoint may be written again."""
        with self._stalled():
            try:
                self._saver.save_in_background(state(), keep)
                self._saved = step
            except RunFailed as error:
                self._tell_unsaved(step, error)

    def save_last(self, step: int, state: StateOf, keep: Keep) -> None:
        """Saves the state that the run ends with, unless that has been done.

        Raises:
            DiskFailed: it could not be written; it is in memory that outlives this process, if there was room.
        """
        with self._stalled():
            self.wait()
            if self._saved != step:
                try:
                    self._saver.save(state(), keep)
                except DiskFailed:
                    self._saver.keep_in_memory(state())
                    raise
                self._saved = step
                self.tell()

    def wait(self) -> None:
        """Until what is being written is there, or has failed."""
        self._saver.wait()
        self.tell()

    def tell(self) -> None:
        """Records what has been saved since, or could not be."""
        for done in self._saver.finished():
            if done.error is not None:
                self._tell_unsaved(done.step, done.error)
                continue
            values = {"seconds": round(done.seconds, 4), "stall": round(done.stall, 4), "bytes": done.bytes}
            more: dict[str, Any] = {"every": done.every} if done.every is not None else {}
            more |= {"deleted": done.deleted} if done.deleted else {}
            self._event("saved", step=done.step, **values, where=done.where, **more)
            if done.deleted:
                gone = f"the checkpoint of step {', '.join(map(str, done.deleted))}"
                self._note(f"the disk is nearly full: {gone} was deleted to make room for that of step {done.step}")

    @contextmanager
    def _stalled(self) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.stall += time.perf_counter() - begin

    def _tell_unsaved(self, step: int, error: RunFailed) -> None:
        self._saved = None if self._saved == step else self._saved
        self._event("save_failed", step=step, error=str(error))
        self._note(f"{error}. Training goes on; it is tried again with the next checkpoint")

    def _tell_damaged(self, damaged: Damaged) -> None:
        self._event("damaged", step=damaged.step, error=str(damaged.error), aside=damaged.aside)
        self._note(f"{damaged.error}; it is now {damaged.aside}, and the one before it is taken")
