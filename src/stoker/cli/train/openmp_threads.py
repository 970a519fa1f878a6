"""Waiting policy of OpenMP's threads, which is read when torch is loaded."""

from __future__ import annotations

import os
import time

import psutil

WATCHED = 0.3  # seconds


def patient_threads() -> None:
    """Lets OpenMP's threads sleep while they wait for each other, if other processes use their cores.

    A step of generation has hundreds of small products. Spinning threads are twice as fast on an idle machine; beside
    other processes they occupy the cores that they wait for, and a step takes many times as long.
    """
    if "OMP_WAIT_POLICY" not in os.environ and others_at_work():
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


def others_at_work() -> bool:
    """Returns whether other processes currently take at least half a core of this one's cores."""
    alone, cores = psutil.Process(), psutil.cpu_count() or 1
    own = len(alone.cpu_affinity()) if hasattr(alone, "cpu_affinity") else cores
    before = _busy() - sum(alone.cpu_times()[:2])
    time.sleep(WATCHED)
    others = (_busy() - sum(alone.cpu_times()[:2]) - before) / WATCHED
    return others >= cores - own + 0.5


def _busy() -> float:
    """Returns the busy seconds of all cores since the machine's start."""
    times = psutil.cpu_times()
    return float(times.user + times.system + getattr(times, "nice", 0.0))
