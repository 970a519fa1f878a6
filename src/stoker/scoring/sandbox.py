"""Sandbox for Python programs that a model wrote.

Each program runs as a separate process with an empty temporary folder and no environment. Its limits:

| limit | Linux on x86-64 and ARM64 |
| --- | --- |
| no network | the kernel's filter of system calls (seccomp) refuses every socket |
| no other process | the filter refuses fork and exec; threads are allowed |
| no file written, renamed or removed | the filter refuses it; files of at most `FILE` bytes besides |
| memory, processor time | limits of the process |
| time | the process is killed |

A program can read files that the user may read, but cannot send them anywhere. Other systems have no such filter, so
programs are not run there.
"""

from __future__ import annotations

import platform
import secrets
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from stoker.errors import CannotRun
from stoker.scoring import sandbox_child

SECONDS = 10.0
MEMORY = 1 << 30  # bytes of address space
FILE = 1 << 20  # bytes


@dataclass(frozen=True)
class ProgramOutcome:
    """Outcome of a program.

    Attributes:
        passed: whether it ran to its end.
        why: ``passed``, ``time``, or the exception or signal that ended it.
    """

    passed: bool
    why: str


def sandbox_problem() -> str:
    """Returns why programs cannot be run on this system; empty if they can."""
    if platform.system() != "Linux" or platform.machine() not in sandbox_child.SYSCALLS:
        return f"there is no sandbox for {platform.system()} on {platform.machine()}"
    return ""


def run_program(program: str, *, seconds: float = SECONDS, memory: int = MEMORY) -> ProgramOutcome:
    """Runs a program in the sandbox.

    Raises:
        CannotRun: this system has no sandbox.
    """
    if problem := sandbox_problem():
        raise CannotRun(problem)
    sign = secrets.token_hex(16)
    arguments = [sign, str(int(seconds) + 1), str(memory), str(FILE)]
    with tempfile.TemporaryDirectory(prefix="stoker-sandbox-") as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", str(Path(sandbox_child.__file__)), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"LC_ALL": "C.UTF-8"},
            start_new_session=True,
        )
        try:
            out, _ = process.communicate(program.encode(), timeout=seconds)
        except subprocess.TimeoutExpired:
            return ProgramOutcome(False, "time")
        finally:
            process.kill()
            process.wait()
    if process.returncode == -signal.SIGXCPU:
        return ProgramOutcome(False, "time")
    said, _, why = out.decode(errors="replace").rpartition("\n")[2].partition(" ")
    if said != sign:
        ended = f"signal {-process.returncode}" if process.returncode < 0 else f"exit code {process.returncode}"
        return ProgramOutcome(False, ended)
    return ProgramOutcome(why == "passed", why)
