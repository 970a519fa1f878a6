"""A part of a benchmark in a process of its own, where nothing else has used memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

LIMIT = 180.0  # seconds of a side on a GPU


def in_own_process(file: str, *what: str, cpu: bool) -> dict[str, Any] | str | None:
    """Runs a benchmark's file with its own options and further ones.

    Returns the result that a side printed; None for other work; the end of what was printed where it failed.
    """
    command = [sys.executable, file, *sys.argv[1:], *what]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""} if cpu else None
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=environment, timeout=None if cpu else LIMIT
        )
    except subprocess.TimeoutExpired:
        return f"not done in {LIMIT:.0f} s"
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or (not lines and "--side" in what):
        return done.stderr[-3000:] or f"exit code {done.returncode}"
    return json.loads(lines[-1].removeprefix("RESULT ")) if lines else None
