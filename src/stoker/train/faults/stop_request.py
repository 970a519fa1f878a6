"""Handling of signals that ask a run to stop."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Thread, Timer
from typing import Any

from stoker.errors import UserError
from stoker.job.blocks.faults_block import FaultsBlock
from stoker.resilience.deadline import end_in_time
from stoker.resilience.heartbeat import Heart
from stoker.resilience.stop_signals import PAUSE, STOPPING, handled_by
from stoker.train.display import Display

PRINTED = 1.0  # timeout in seconds for the note to be printed


class StopRequest:
    """Stop flag set by SIGINT, SIGTERM or SIGHUP: the run ends with its step and a checkpoint.

    A second signal ends it at once. The supervisor may also ask for a pause: the processes stop after their step, and
    others resume from there.

    Attributes:
        signal: number of the received signal; None before.
        pause: whether a pause was asked for.
    """

    def __init__(self, *, faults: FaultsBlock, heart: Heart, display: Display) -> None:
        self._faults, self._heart, self._display = faults, heart, display
        self._timer: Timer | None = None
        self._note: Thread | None = None
        self.signal: int | None = None
        self.pause = False

    def is_made(self) -> bool:
        """Returns whether this process has been asked to stop."""
        return self.signal is not None or self.pause

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Handles the signals within the block."""
        try:
            with handled_by(self._handle):
                if self._heart.watched:
                    signal.signal(PAUSE, self._pause)
                yield
        finally:
            if self._heart.watched:
                signal.signal(PAUSE, signal.SIG_IGN)
            if self._timer is not None:
                self._timer.cancel()
            if self._note is not None:
                self._note.join(PRINTED)

    def _say_so(self) -> None:
        """Prints the note in another thread: a signal may come within a print of this one, which cannot be nested."""
        with suppress(OSError, UserError):  # nobody reads it
            self._display.note(STOPPING)

    def _pause(self, *_: Any) -> None:
        self.pause = True

    def _handle(self, number: int, _: Any) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number
        if not self._heart.watched:  # else the supervisor prints this and enforces the deadline
            with suppress(RuntimeError):  # no thread can be started
                if number == signal.SIGTERM:
                    self._timer = end_in_time(self._faults)
                note = Thread(target=self._say_so, daemon=True)
                note.start()
                self._note = note
