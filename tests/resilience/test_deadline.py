"""The end at the deadline after SIGTERM, with the exit code on which the job is requeued."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from stoker.job.blocks.faults_block import FaultsBlock
from stoker.resilience.deadline import exit_code, seconds_left

ENDS = """
import time
from stoker.job.blocks.faults_block import FaultsBlock
from stoker.resilience.deadline import end_in_time
end_in_time(FaultsBlock(deadline=1, requeue=99))
time.sleep(30)
"""


@pytest.mark.parametrize("errors", ["closed", "full", "unread"])
def test_the_deadline_is_kept_where_standard_error_cannot_be_written(errors: str) -> None:
    reads, writes = os.pipe()
    if errors == "closed":
        os.close(reads)
    elif errors == "unread":
        os.set_blocking(writes, False)
        while True:
            try:
                os.write(writes, bytes(1 << 12))
            except BlockingIOError:
                break
        os.set_blocking(writes, True)
    else:
        os.close(writes)
        writes = os.open("/dev/full", os.O_WRONLY)
    ended = subprocess.run([sys.executable, "-c", ENDS], stderr=writes, check=False, timeout=25)
    assert ended.returncode == 99


def test_the_deadline_is_kept_where_no_thread_can_be_started() -> None:
    broken = """
import threading
start, count = threading.Thread.start, 0
def refuses(thread):
    global count
    count += 1
    if count > 1:
        raise RuntimeError("can't start new thread")
    start(thread)
threading.Thread.start = refuses
"""
    ended = subprocess.run([sys.executable, "-c", broken + ENDS], capture_output=True, check=False, timeout=25)
    assert ended.returncode == 99


def test_only_a_scheduler_ends_a_run_so_that_it_is_queued_again() -> None:
    faults = FaultsBlock(requeue=99)
    assert exit_code(signal.SIGTERM, faults) == 99 and exit_code(signal.SIGINT, faults) == 130
    assert exit_code(signal.SIGTERM, FaultsBlock()) == 143
    assert exit_code(signal.SIGTERM, FaultsBlock(requeue=0)) == 0


def test_a_deadline_that_is_nearer_than_the_end_takes_is_now() -> None:
    assert seconds_left(FaultsBlock(deadline=30)) == 29 and seconds_left(FaultsBlock(deadline=0.5)) == 0
