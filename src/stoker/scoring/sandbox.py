"""Sandbox for Python programs that a model wrote.

Each program runs as a separate process with an empty temporary folder and no environment. Its limits:

| limit | Linux on x86-64 and ARM64 |
| --- | --- |
| no network | the kernel's filter of system calls (seccomp) refuses every socket |
| no other process or thread | the filter refuses fork, exec and clone |
| no effect on other processes | the filter refuses signals, shared memory, locks and scheduling |
| no file of the user read | Landlock refuses files other than Python's and the system's libraries (Linux 5.13) |
| no privilege | capabilities are dropped |
| no file written, renamed or removed | the filter refuses it; files of at most `FILE` bytes besides |
| memory, processor time | limits of the process |
| time | the process is killed |

Without Landlock (an older kernel, or one that has it disabled) a program can read files that the user may read; with
it, only whether a file exists and how large it is. Of what a program says, a reader of its outcome sees the name of a
builtin exception at most. Other systems have no such filter, so programs are not run there.

The sandbox protects the machine. It protects the score less well, as the tests run in the program's own process. The
outcome counts only behind a secret that no Python object of the program's process refers to, so a program that ends
early, raises, or writes into the pipe has not passed. But a program that searches its memory (``ctypes``,
``/proc/self/mem``) can find the secret, and one that changes what the tests call or compare passes without it.
"""

from __future__ import annotations

import builtins
import os
import platform
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from stoker.errors import CannotRun
from stoker.files import has_input
from stoker.scoring import sandbox_child

SECONDS = 10.0
MEMORY = 1 << 30  # bytes of address space
FILE = 1 << 20  # bytes
OWN_EXCEPTION = "an exception of its own"
OUTPUT = 4096  # bytes of a program's outcome; a program that writes more is ended


@dataclass(frozen=True)
class ProgramOutcome:
    """Outcome of a program.

    Attributes:
        passed: whether it ran to its end.
        why: ``passed``, ``time``, ``output``, the builtin exception or the signal that ended it, or `OWN_EXCEPTION`.
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
    sign = secrets.token_hex(sandbox_child.SIGN // 2).encode()
    deadline = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="stoker-sandbox-") as folder:
        process = subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", "-B", str(Path(sandbox_child.__file__))),
                *(str(limit) for limit in (int(seconds) + 1, memory, FILE)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"LC_ALL": "C.UTF-8"},
            start_new_session=True,
        )
        try:
            out = _exchange(process, sign + program.encode(), deadline)
        except subprocess.TimeoutExpired:
            return ProgramOutcome(False, "time")
        finally:
            process.kill()
            process.wait()
            process.stdout.close()  # type: ignore[union-attr]
    if process.returncode == -signal.SIGXCPU:
        return ProgramOutcome(False, "time")
    if len(out) > OUTPUT:
        return ProgramOutcome(False, "output")
    before, _, outcome = out.rpartition(b"\n")
    if outcome == sign + sandbox_child.PASSED:
        return ProgramOutcome(True, "passed")
    if outcome == sign + sandbox_child.FAILED:
        return ProgramOutcome(False, _builtin_exception(before.rpartition(b"\n")[2].decode(errors="replace")))
    ended = f"signal {-process.returncode}" if process.returncode < 0 else f"exit code {process.returncode}"
    return ProgramOutcome(False, ended)


def _builtin_exception(name: str) -> str:
    """Returns the name that a program gives for its exception, if Python has an exception of that name."""
    found = getattr(builtins, name, None)
    return name if isinstance(found, type) and issubclass(found, BaseException) else OWN_EXCEPTION


def _exchange(process: subprocess.Popen[bytes], given: bytes, deadline: float) -> bytes:
    """Gives a process its input; returns its output at its end, or more than `OUTPUT` bytes as soon as it has written
    them.

    Raises:
        TimeoutExpired: it has not ended by the deadline.
    """
    assert process.stdin is not None and process.stdout is not None
    with suppress(BrokenPipeError), process.stdin:
        process.stdin.write(given)  # the child reads all of it before it runs the program
    out = b""
    while len(out) <= OUTPUT:
        left = max(0.0, deadline - time.monotonic())
        if not has_input(process.stdout.fileno(), left):
            raise subprocess.TimeoutExpired(process.args, left)
        some = os.read(process.stdout.fileno(), OUTPUT)
        if not some:
            process.wait(max(0.0, deadline - time.monotonic()))
            break
        out += some
    return out
