"""Runs cases in forked processes, each with a limit of time and memory, and sorts them by how they ended."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

MEMORY = 8 << 30  # bytes of address space; a case that asks for more gets a MemoryError
PATIENCE = 6  # times the limit that a case may take on a busy machine, where it does not compute
ESCAPED = 97  # exit code of a case whose function raised
LONGEST_OUTPUT = 1 << 20


@dataclass(frozen=True)
class Case:
    """One input: its name (kind, seed and number) and the function that runs it inside a folder of its own."""

    name: str
    run: Callable[[], int]


@dataclass(frozen=True)
class Outcome:
    """How a case ended.

    Attributes:
        kind: accepted, refused (exit code 2 or 3), failed (1), late (accepted by the first verb and refused by a
            later one), traceback, killed (by a signal), hang.
    """

    case: str
    kind: str
    text: str
    seconds: float


def run_cases(
    cases: Iterable[Case], folder: Path, *, limit: float, workers: int, keep: bool = False
) -> Iterator[Outcome]:
    """Runs each case in a process and an empty folder of its own; gives the outcomes as they come.

    Args:
        limit: seconds of computing after which a case counts as a hang; several times as many where it waits.
        workers: cases that run at the same time.
        keep: leave the folders of the cases for a person to look at.
    """
    waiting = iter(cases)
    running: dict[int, tuple[Case, Path, float]] = {}
    while True:
        while len(running) < workers and (case := next(waiting, None)) is not None:
            own = folder / case.name
            shutil.rmtree(own, ignore_errors=True)
            own.mkdir(parents=True)
            running[_start(case, own)] = case, own, time.monotonic()
        if not running:
            return
        for process, (case, own, started) in list(running.items()):
            ended, status = os.waitpid(process, os.WNOHANG)
            seconds = time.monotonic() - started
            if not ended and seconds < limit * PATIENCE and (seconds < limit or _computed(process) < limit):
                continue
            _end_group(process)
            if not ended:
                os.waitpid(process, 0)
            del running[process]
            yield _outcome(case.name, own, status if ended else None, seconds)
            if not keep:
                shutil.rmtree(own, ignore_errors=True)
        time.sleep(0.004)


def _start(case: Case, own: Path) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if process:
        return process
    code = ESCAPED
    try:
        os.setpgid(0, 0)
        os.chdir(own)
        for number, name in ((0, os.devnull), (1, "stdout"), (2, "stderr")):
            opened = os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            os.dup2(opened, number)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        code = case.run()
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _computed(process: int) -> float:
    """Seconds of the processor that a process has used so far; where the system does not say, more than any limit."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    except OSError:
        return float("inf")
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _end_group(process: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)


def _outcome(name: str, own: Path, status: int | None, seconds: float) -> Outcome:
    text = "".join(
        (own / part).read_bytes()[:LONGEST_OUTPUT].decode("utf-8", "replace")
        for part in ("stdout", "stderr")
        if (own / part).is_file()
    )
    if status is None:
        kind = "hang"
    elif os.WIFSIGNALED(status):
        kind = "killed"
    elif "Traceback (most recent call last)" in text or os.WEXITSTATUS(status) == ESCAPED:
        kind = "traceback"
    else:
        kind = {0: "accepted", 1: "failed", LATE: "late"}.get(os.WEXITSTATUS(status), "refused")
    return Outcome(name, kind, text, seconds)


LATE = 96
