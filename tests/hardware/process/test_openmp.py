"""OpenMP threads of threads that have ended, counted in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from stoker.hardware.process.openmp import in_temporary_thread

COUNTED = """
import os, time, torch
from stoker.hardware.process.openmp import in_temporary_thread, without_openmp

def large():
    torch.ones(1 << 22).exp_()
    return threads()

def small():
    without_openmp()
    return large()

def threads():
    return len(os.listdir("/proc/self/task"))

def settled(count):  # threads end a moment after their work
    end = time.monotonic() + 20
    while threads() > count and time.monotonic() < end:
        time.sleep(0.01)
    return threads()

torch.set_num_threads(3)
before = threads()
within = in_temporary_thread(large)
after = settled(before)
in_main = large()
alone = in_temporary_thread(small)
settled(in_main)
print(within - before, after - before, in_main - before, alone - in_main, large() - before)
"""


@pytest.mark.slow
def test_a_temporary_thread_takes_its_openmp_threads_with_it() -> None:
    found = subprocess.run(
        [sys.executable, "-c", COUNTED],
        check=True,
        capture_output=True,
        text=True,
    )
    within, after, in_main, alone, in_main_again = map(int, found.stdout.split())
    assert (within, after, in_main, alone, in_main_again) == (3, 0, 2, 1, 2)


def test_a_temporary_thread_gives_what_the_function_gave() -> None:
    assert in_temporary_thread(lambda: 7) == 7
