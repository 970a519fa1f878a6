"""The signals that end a run or a command, and their handlers."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PAUSE = signal.SIGUSR1  # sent by the supervisor only: stop after this step, and leave the state in memory
SENT_TWICE = (signal.SIGTERM, signal.SIGHUP)
SAME = 5.0  # seconds
STOPPING = "stopping after this step or evaluation ... (once more to stop at once, without a checkpoint)"
STOPPED_BEFORE = "stopped before the first step of this start: no checkpoint was written"


@contextmanager
def handled_by(handler: Callable[[int, Any], None], signals: Sequence[signal.Signals] = STOPS) -> Iterator[None]:
    """Context in which the signals call a handler; it has no effect outside of the main thread.

    Schedulers send SIGTERM to every process of a job, and the supervisor forwards it; a closed terminal and its shell
    both send SIGHUP: such signals within `SAME` seconds are one request. SIGHUP stays ignored under ``nohup``.
    """
    last = -math.inf

    def once(number: int, frame: Any) -> None:
        nonlocal last
        now = time.monotonic()
        is_same = number in SENT_TWICE and now - last < SAME
        last = now if number in SENT_TWICE and not is_same else last
        if not is_same:
            handler(number, frame)

    try:
        ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        numbers = [number for number in signals if number != signal.SIGHUP or not ignored]
        before = {number: signal.signal(number, once) for number in numbers}
    except ValueError:
        before = {}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


class SignalExit(SystemExit):
    """A signal ends the command. Code that handles a user's `SystemExit` lets this one through."""


@contextmanager
def deferred_stops(words: str) -> Iterator[Sequence[int]]:
    """Context in which a first stop signal prints ``words`` and is noted; a second one ends the command, as elsewhere.

    Yields:
        The signals so far, of which the caller raises the first by `end_by` when it has finished.
    """
    numbers: list[int] = []

    def note(number: int, _: Any) -> None:
        numbers.append(number)
        if len(numbers) > 1:
            end_by(number)
        print(words, file=sys.stderr, flush=True)

    with handled_by(note):
        yield numbers


def end_by(number: int) -> NoReturn:
    """Raises what a stop signal raises in a command: KeyboardInterrupt or `SignalExit`."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SignalExit(128 + number)


def exit_at_signals() -> AbstractContextManager[None]:
    """Returns a context in which SIGTERM and SIGHUP raise `SignalExit`, as Ctrl-C raises KeyboardInterrupt.

    Half-written files are removed, and child processes ended. The exit code is a shell's.
    """
    return handled_by(lambda number, _: end_by(number), SENT_TWICE)


@contextmanager
def stop_is_success(*, at_once: bool = False) -> Iterator[None]:
    """Context of a server: Ctrl-C and SIGTERM leave it without an error, also before the server listens.

    Args:
        at_once: end the process: an orderly exit aborts beside a thread that loads a model.
    """
    try:
        yield
    except (KeyboardInterrupt, SignalExit) as stop:
        if isinstance(stop, SignalExit) and stop.code != 128 + signal.SIGTERM:
            raise
        print("ended", file=sys.stderr, flush=True)
        if at_once:
            os._exit(0)
