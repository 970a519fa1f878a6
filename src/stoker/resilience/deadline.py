"""The deadline between SIGTERM and the end of a run; unsaved work is lost."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress

from stoker.job.blocks.faults_block import FaultsBlock

SPARE = 1.0  # seconds reserved before the deadline for ending the processes
REPORT = 0.5  # seconds that the message may take; part of SPARE
SIGNAL_EXIT = 128  # shell convention: 128 + the signal that ended the command


def exit_code(number: int, faults: FaultsBlock) -> int:
    """Returns the exit code of a run ended by a signal; after SIGTERM the one on which the scheduler requeues it."""
    asked_for = faults.requeue if number == signal.SIGTERM else None
    return SIGNAL_EXIT + number if asked_for is None else asked_for


def seconds_left(faults: FaultsBlock) -> float:
    """Returns the seconds that a run has after SIGTERM."""
    return max(0.0, faults.deadline - SPARE)


def end_in_time(faults: FaultsBlock) -> threading.Timer:
    """Ends this process at the deadline, whatever it is doing; the newest checkpoint is then used."""
    timer = threading.Timer(seconds_left(faults), _end, [exit_code(signal.SIGTERM, faults)])
    timer.daemon = True
    timer.start()
    return timer


def _end(code: int) -> None:
    last = threading.Timer(REPORT, os._exit, (code,))  # nobody may read the message
    last.daemon = True
    try:
        last.start()
        with suppress(OSError, ValueError):
            print("the deadline has come: what was saved before counts", file=sys.stderr, flush=True)
    finally:  # also where no thread can be started
        os._exit(code)
