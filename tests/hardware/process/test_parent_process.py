"""A process ends with the one that started it, also if that has ended before the process looks for it."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress

import psutil

CHILD = """
import os, time
import stoker.cli.main
parent = os.getppid()
print("imported", flush=True)
while os.getppid() == parent:
    time.sleep(0.01)
from stoker.hardware.process.parent_process import STARTED_BY, end_with
end_with(STARTED_BY)
time.sleep(60)
"""
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
child.stdout.readline()
print(child.pid)
"""


def test_a_parent_that_ended_during_the_imports_ends_its_child() -> None:
    said = subprocess.run([sys.executable, "-c", PARENT, CHILD], capture_output=True, text=True, check=True).stdout
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int(said)).wait(20)
