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

torch.set_num_threads(3)
before = threads()
within = in_temporary_thread(large)
end = time.monotonic() + 20
while threads() > before and time.monotonic() < end:  # they end a moment after the thread that they served
    time.sleep(0.01)
after = threads()
in_main = large()
print(within - before, after - before, in_main - before, in_temporary_thread(small) - in_main, large() - before)
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
