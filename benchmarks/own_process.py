"""A part of a benchmark in a process of its own, where nothing else has used memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from subprocess import PIPE
from typing import Any

LIMIT = 180.0  # seconds of a side on a GPU
PATIENCE = 10.0  # seconds for the end of one that is over


def in_own_process(file: str, *what: str, cpu: bool) -> dict[str, Any] | str | None:
    """Runs a benchmark's file with its own options and further ones.

    Returns the result that a side printed; None for other work; the end of what was printed where it failed, or where
    it was when its time was over.
    """
    command = [sys.executable, file, *sys.argv[1:], *what]
    environment = os.environ | {"PYTHONFAULTHANDLER": "1"} | ({"CUDA_VISIBLE_DEVICES": ""} if cpu else {})
    process = subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True, env=environment)
    try:
        out, said = process.communicate(timeout=None if cpu else LIMIT)
    except subprocess.TimeoutExpired:
        return f"not done in {LIMIT:.0f} s: {_place(process)[-3000:]}"
    lines = [line for line in out.splitlines() if line.startswith("RESULT ")]
    if process.returncode or (not lines and "--side" in what):
        return said[-3000:] or f"exit code {process.returncode}"
    return json.loads(lines[-1].removeprefix("RESULT ")) if lines else None


def _place(process: subprocess.Popen[str]) -> str:
    """Ends a process; returns what it has said, and where its threads were."""
    process.send_signal(signal.SIGABRT)
    with suppress(subprocess.TimeoutExpired):  # processes that it has started may hold its output
        return process.communicate(timeout=PATIENCE)[1].partition("Extension modules:")[0]
    process.kill()
    return "it did not end by itself"
