"""The processes of one start of a run: starts them, forwards signals, polls and ends them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from stoker.hardware.process.blocked_signals import blocked_signals
from stoker.launch.cluster_env import RankInfo
from stoker.launch.first_failure import Failure, failure_of_exit
from stoker.launch.forkserver import CONTEXT, FORKS
from stoker.launch.run_spec import RunSpec
from stoker.launch.worker_main import main
from stoker.resilience.deadline import SIGNAL_EXIT
from stoker.resilience.stop_signals import PAUSE, STOPS
from stoker.train.run_result import RunResult

GRACE = 3.0  # seconds that the others get to end by themselves when one has failed, or when all must end


class Processes:
    """Starts the processes of a node, forwards signals to them, and ends the rest when one fails.

    Args:
        ranks: one for each process.
        secret: shared by the processes of the run.
        asked: signals that this process got, as they come.
    """

    def __init__(self, spec: RunSpec, ranks: Sequence[RankInfo], secret: bytes, *, asked: Sequence[int]) -> None:
        self._spec, self._secret, self._asked = spec, secret, asked
        self._ranks = ranks
        self._processes: list[BaseProcess] = []
        self._endings: list[Connection] = []
        self._handed_on = 0
        self._deadline: float | None = None
        self._codes: list[int | None] = []  # before any was ended here
        self._ended_here = False

    def start(self) -> None:
        """Starts them. They begin with the signals blocked, until they have handlers."""
        parent = None if FORKS else os.getpid()
        try:
            with blocked_signals(STOPS):
                for info in self._ranks:
                    ours, theirs = CONTEXT.Pipe(duplex=False)
                    arguments = (theirs, self._spec, info, self._secret, parent)
                    process = CONTEXT.Process(target=main, args=arguments, name=f"rank-{info.rank}")
                    process.start()
                    theirs.close()
                    self._processes.append(process)
                    self._endings.append(ours)
        finally:
            for info in self._ranks:
                if info.listening is not None:
                    info.listening.close()  # the process has its own

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the running processes, by rank."""
        pairs = zip(self._ranks, self._processes, strict=False)
        living = [(info.rank, p.pid) for info, p in pairs if p.exitcode is None]
        return {rank: pid for rank, pid in living if pid is not None}

    @property
    def killed(self) -> bool:
        """Returns whether a process was killed from outside."""
        return any(code is not None and code < 0 for code in self._codes)

    @property
    def one_has_failed(self) -> bool:
        """Returns whether a process ended by itself with an error."""
        return any(self._codes)

    def wait(self, seconds: float) -> None:
        """Waits until a process ends, at most ``seconds``."""
        wait([process.sentinel for process in self._processes if process.exitcode is None], seconds)

    def look(self) -> None:
        """Polls the processes; call it repeatedly while they run."""
        if not self._ended_here:
            self._codes = [process.exitcode for process in self._processes]
        for number in self._asked[self._handed_on :]:
            self._hand_on(number)
        if self._deadline is None and (len(self._asked) > 1 or any(self._codes)):
            # A killed process reports nothing, and the others report only its absence.
            self._deadline = time.monotonic() + (0 if self.killed and not self._asked else GRACE)
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self.kill()

    def end(self, grace: float) -> None:
        """Has those that still run ended after ``grace`` seconds, as processes elsewhere have failed."""
        deadline = time.monotonic() + grace
        self._deadline = deadline if self._deadline is None else min(deadline, self._deadline)

    def pause(self) -> None:
        """Asks them to stop after their step, with the state in memory."""
        for pid in self.pids.values():
            with suppress(ProcessLookupError):
                os.kill(pid, PAUSE)

    def _hand_on(self, number: int) -> None:
        self._handed_on += 1
        for pid in self.pids.values():
            with suppress(ProcessLookupError):  # it ended a moment ago
                os.kill(pid, number)

    def kill(self) -> None:
        """Kills the processes that still run."""
        self._ended_here = True
        for process in self._processes:
            if process.exitcode is None:
                process.kill()
        for process in self._processes:
            process.join()

    def ending(self) -> RunResult | None:
        """Returns the result of the first process, once all have ended; None if one failed."""
        if any(process.exitcode for process in self._processes) or not self._endings[0].poll():
            return None
        with suppress(EOFError):  # it ended without reporting why
            ending: RunResult = self._endings[0].recv()
            return ending
        return None

    def failures(self, reported: set[int]) -> list[Failure]:
        """Failures of processes that wrote none: killed from outside, crashed, or without a disk to write to.

        Args:
            reported: the ranks that wrote a failure themselves.
        """
        no_reason = (None, 0, SIGNAL_EXIT + signal.SIGTERM)  # ended here, ended well, or as it was asked to
        ends = zip(self._ranks, self._processes, self._codes, self._endings, strict=False)
        return [
            _sent(ending) or failure_of_exit(info.rank, process.pid, code)
            for info, process, code, ending in ends
            if code not in no_reason and info.rank not in reported
        ]


def _sent(ending: Connection) -> Failure | None:
    """Returns the failure that a process that has ended sent; None if it sent none."""
    with suppress(EOFError, OSError):
        if ending.poll():
            message = ending.recv()
            return message if isinstance(message, Failure) else None
    return None
