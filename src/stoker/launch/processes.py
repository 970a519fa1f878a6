"""The processes of one start of a run: starts them, forwards signals, polls and ends them."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from stoker.launch.cluster_env import RankInfo
from stoker.launch.first_failure import Failure, failure_of_exit
from stoker.launch.forkserver import START
from stoker.launch.process_group import new_secret
from stoker.launch.run_spec import RunResult, RunSpec
from stoker.launch.worker_main import Entry, main
from stoker.resilience.deadline import SIGNAL_EXIT
from stoker.resilience.stop_signals import STOPS

GRACE = 3.0  # seconds that the others get to end by themselves when one has failed, or when all are to end at once


class Processes:
    """Starts the processes, forwards signals to them, and ends the rest when one fails.

    They find each other through a file and listen on the loopback interface only.

    Args:
        entry: what each process calls instead of training.
        meet: a file that does not exist yet, in a folder of this user's alone.
        asked: signals that this process got, as they come.
    """

    def __init__(self, spec: RunSpec, entry: Entry | None, *, meet: Path, asked: Sequence[int]) -> None:
        self._spec, self._entry, self._meet, self._asked = spec, entry, meet, asked
        self._ranks: list[BaseProcess] = []
        self._endings: list[Connection] = []
        self._handed_on = 0
        self._deadline: float | None = None
        self._codes: list[int | None] = []  # before any was ended here
        self._ended_here = False

    def start(self) -> None:
        """Starts them. They begin with the signals blocked, until they have handlers."""
        world = self._spec.layout.world
        parent = os.getpid() if START == "spawn" else None
        secret = new_secret()
        entry = pickle.dumps(self._entry) if self._entry else None
        resource_tracker.ensure_running()  # it would unblock the signals again if it began later
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
        try:
            context = multiprocessing.get_context(START)
            for rank in range(world):
                ours, theirs = context.Pipe(duplex=False)
                rank_info = RankInfo(rank, world, rank, world, self._meet)
                arguments = (theirs, self._spec, rank_info, secret, entry, parent)
                process = context.Process(target=main, args=arguments, name=f"rank-{rank}")  # type: ignore[attr-defined]
                process.start()
                theirs.close()
                self._ranks.append(process)
                self._endings.append(ours)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the running processes, by rank."""
        living = [(rank, p.pid) for rank, p in enumerate(self._ranks) if p.exitcode is None]
        return {rank: pid for rank, pid in living if pid is not None}

    @property
    def one_has_failed(self) -> bool:
        """Whether one ended by itself with an error."""
        return any(self._codes)

    def wait(self, seconds: float) -> None:
        """Waits until a process ends, at most ``seconds``."""
        wait([process.sentinel for process in self._ranks if process.exitcode is None], seconds)

    def look(self) -> None:
        """Polls the processes; call it repeatedly while they run."""
        if not self._ended_here:
            self._codes = [process.exitcode for process in self._ranks]
        for number in self._asked[self._handed_on :]:
            self._hand_on(number)
        if self._deadline is None and (len(self._asked) > 1 or any(self._codes)):
            # One that was killed says nothing, and what the others say of it is no news.
            killed = any(code is not None and code < 0 for code in self._codes)
            self._deadline = time.monotonic() + (0 if killed and not self._asked else GRACE)
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self.kill()

    def _hand_on(self, number: int) -> None:
        self._handed_on += 1
        for pid in self.pids.values():
            with suppress(ProcessLookupError):  # it ended a moment ago
                os.kill(pid, number)

    def kill(self) -> None:
        """Kills the processes that still run."""
        self._ended_here = True
        for process in self._ranks:
            if process.exitcode is None:
                process.kill()
        for process in self._ranks:
            process.join()

    def ending(self) -> RunResult | None:
        """The first process' result, once all have ended; None where one failed."""
        if any(process.exitcode for process in self._ranks) or not self._endings[0].poll():
            return None
        with suppress(EOFError):  # it ended without reporting why
            ending: RunResult = self._endings[0].recv()
            return ending
        return None

    def failures(self, reported: set[int]) -> list[Failure]:
        """Failures of processes that ended without reporting one: killed from outside, or crashed.

        Args:
            reported: the ranks that reported a failure themselves.
        """
        no_reason = (None, 0, SIGNAL_EXIT + signal.SIGTERM)  # ended here, ended well, or as it was asked to
        ends = enumerate(zip(self._ranks, self._codes, strict=True))
        return [
            failure_of_exit(rank, process.pid, code)
            for rank, (process, code) in ends
            if code not in no_reason and rank not in reported
        ]
