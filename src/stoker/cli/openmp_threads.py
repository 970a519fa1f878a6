"""How OpenMP's threads wait for each other. They read it when torch is loaded."""

from __future__ import annotations

import os
import time

import psutil

WATCHED = 0.3  # seconds


def patient_threads() -> None:
    """Lets OpenMP's threads sleep while they wait for each other, where other work has their cores.

    A step of generation is hundreds of small products. Threads that spin between them are twice as fast alone; beside
    other work they take the cores from what they wait for, and a step takes many times as long.
    """
    if "OMP_WAIT_POLICY" not in os.environ and others_at_work():
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


def others_at_work() -> bool:
    """Whether other processes leave this one less than its cores at the moment, by half a core or more."""
    alone, cores = psutil.Process(), psutil.cpu_count() or 1
    own = len(alone.cpu_affinity()) if hasattr(alone, "cpu_affinity") else cores
    before = _busy() - sum(alone.cpu_times()[:2])
    time.sleep(WATCHED)
    others = (_busy() - sum(alone.cpu_times()[:2]) - before) / WATCHED
    return others >= cores - own + 0.5


def _busy() -> float:
    """Seconds of all cores since the machine's start."""
    times = psutil.cpu_times()
    return float(times.user + times.system + getattr(times, "nice", 0.0))
