"""The output of a program that asks the system about its devices."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress

KILLED = 1.0  # seconds that a killed program gets to end; a broken driver can keep it from that


def program_output(*command: str, seconds: float) -> str | None:
    """Runs a program that is found on PATH; returns its output, None if it is missing, fails, or takes too long."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            errors="replace",
            env={**os.environ, "LC_ALL": "C"},
        )
    except OSError:
        return None
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        assert process.stdout is not None
        process.stdout.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(KILLED)
        return None
    return output if process.returncode == 0 else None
