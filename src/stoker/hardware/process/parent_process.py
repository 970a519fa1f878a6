"""Ends this process together with the process that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

PR_SET_PDEATHSIG = 1  # linux/prctl.h
LOOK_EVERY = 0.5  # seconds between two looks at the parent
STARTED_BY = os.getppid()  # when this module was imported; the parent may end while others are


def die_with_parent() -> None:
    """Has the kernel end this process with SIGTERM when the thread that started it has ended; Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def end_with(parent: int) -> None:
    """Has this process killed when its parent, of that process id, has ended in any way."""
    if sys.platform == "linux":  # the kernel does it, also where this process hangs
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_watch, args=(parent,), daemon=True, name="parent-watch").start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_EVERY)
    os._exit(1)
