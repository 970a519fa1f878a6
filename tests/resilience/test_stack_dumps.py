"""A process that stopped appends its stack to its log; processes that wait for others are recognised."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.resilience.stack_dumps import ask_for_stacks, stack_file, waits_for_others

STOPS = """
import sys, time
from pathlib import Path
from stoker.resilience.stack_dumps import write_stacks_when_asked
def its_own_work():
    print("there", flush=True)
    time.sleep(600)
write_stacks_when_asked(Path(sys.argv[1]), 1)
its_own_work()
"""
COLLECTIVE = """Thread 0x1 (most recent call first):
  File "/x/process.py", line 47 in _watch

Current thread 0x2 (most recent call first):
  File "/x/torch/distributed/distributed_c10d.py", line 5 in barrier
  File "/x/train.py", line 1 in its_own_work
"""


@pytest.fixture
def stopped(tmp_path: Path) -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", STOPS, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "there\n"
    yield process.pid
    process.kill()
    process.communicate()


def test_a_stopped_process_says_where(tmp_path: Path, stopped: int) -> None:
    with stack_file(tmp_path, 1).open("a") as file:
        file.write("of an earlier start\n")
    found = ask_for_stacks({1: stopped}, folder=tmp_path, logs=tmp_path, collectives=False)
    assert found.files == [stack_file(tmp_path, 1)]
    assert found.texts[1].count("in its_own_work") == 1 and "earlier" not in found.texts[1]
    assert not waits_for_others(found.texts[1])
    again = ask_for_stacks({1: stopped}, folder=tmp_path, logs=tmp_path, collectives=False)
    assert again.texts[1].count("in its_own_work") == 1
    assert stack_file(tmp_path, 1).read_text().count("in its_own_work") == 2


@pytest.mark.slow
def test_a_frozen_process_says_nothing_and_is_not_waited_for(tmp_path: Path, stopped: int) -> None:
    os.kill(stopped, 19)  # SIGSTOP
    found = ask_for_stacks({1: stopped}, folder=tmp_path, logs=tmp_path, collectives=False)
    assert found.texts == {1: ""} and found.files == []


def test_the_innermost_frame_of_the_main_thread_decides() -> None:
    assert waits_for_others(COLLECTIVE)
    assert not waits_for_others(COLLECTIVE.replace("torch/distributed", "torch/nn"))
    assert not waits_for_others("")
