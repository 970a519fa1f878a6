"""Limits OpenMP threads: large operations keep them for the thread that ran them, as long as it lives.

libgomp counts these threads over the whole process. Once they outnumber the cores, threads that wait for the next
operation sleep immediately instead of spinning, and hundreds of small operations take two to three times as long:
docs/log.md, 2026-11-23. So when the computing thread begins, no other thread may have any.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from stoker.hardware.process.daemon_thread import in_daemon_thread

T = TypeVar("T")


def in_temporary_thread(function: Callable[[], T]) -> T:
    """Calls a function in a thread that ends with it, and with its OpenMP threads.

    Raises:
        Exception: what the function raised.
    """
    found = in_daemon_thread(function, "temporary")  # an interrupt does not wait for it
    try:
        return found.result()
    finally:
        del found  # see `stoker.hardware.process.daemon_thread`


def without_openmp() -> None:
    """Limits the calling thread to one OpenMP thread per operation.

    Threads that ran torch before keep their number; those that call torch for the first time afterwards get one as
    well.
    """
    torch.set_num_threads(1)
