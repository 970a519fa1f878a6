"""Starts the processes of a run on this machine, by the torch elastic agent, and tells how they ended."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from stoker.errors import RunFailed
from stoker.launch.child import SIGNAL_EXIT, STOPS, Entry, main
from stoker.launch.failure import Failure, Interrupted, error_of, failure_of_exit, first_of
from stoker.launch.work import Ending, Work

POLL = 0.05  # seconds between two looks at the processes
OVER = 30.0  # seconds that the agent gets to see that all processes have ended
GRACE = 3.0  # seconds that the others get to end by themselves when one has failed, or when all are to end at once


def train_here(work: Work, entry: Entry | None = None) -> Ending:
    """Trains in as many processes as the layout has; the caller holds the run's folder.

    The first SIGINT or SIGTERM is handed on to all of them, which stop after their step; a second ends them.

    Args:
        entry: what each process calls instead of training.

    Raises:
        UserError: a process raised one; of the same class, with the same words.
        RankFailed: a process met a bug or was killed.
        Interrupted: a signal ended the processes before they had an outcome.
    """
    work.logs.mkdir(parents=True, exist_ok=True)
    work.forget_failures()
    agent, processes = _Agent(work, entry), _Processes(work.layout.world)
    try:
        with _signals_to(processes.signal):
            agent.start()
            while agent.is_alive() and not processes.long_over():
                processes.look()
                agent.join(POLL)
            processes.look()
    finally:
        processes.kill()
    if agent.endings is not None:
        return agent.endings[0]
    if processes.asked:
        raise Interrupted(processes.asked[0])
    if agent.error is not None and not isinstance(agent.error, ChildFailedError):
        raise agent.error
    failures = work.failures()
    failures += processes.failures({failure.rank for failure in failures})
    if not failures:
        raise RunFailed(f"the processes ended without an outcome; their logs are in {work.logs}")
    log = work.log_of(first_of(failures).rank)
    raise error_of(failures, world=work.layout.world, where=f"its log is {log}")


class _Agent(threading.Thread):
    """The elastic agent, in a thread of its own: in the main thread it would take the signals for itself."""

    def __init__(self, work: Work, entry: Entry | None) -> None:
        super().__init__(name="elastic-agent", daemon=True)
        self._arguments = (work, pickle.dumps(entry) if entry else None, os.getpid())
        self._config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=work.layout.world,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            monitor_interval=POLL,
            logs_specs=DefaultLogsSpecs(log_dir=os.devnull),  # each process keeps its own
        )
        self.endings: dict[int, Ending] | None = None
        self.error: Exception | None = None
        # What the agent says of a failure, the error says better.
        for library in ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing.spawn"):
            logging.getLogger(library).setLevel(logging.CRITICAL)
        resource_tracker.ensure_running()  # it would unblock the signals again if it began later

    def run(self) -> None:
        # The processes begin with the signals blocked, as this thread has them, until they have handlers.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
        try:
            self.endings = elastic_launch(self._config, main)(*self._arguments)
        except Exception as error:
            self.error = error


class _Processes:
    """The agent's processes: hands signals on to them, and ends what is left when one of them has failed."""

    def __init__(self, world: int) -> None:
        self.asked: list[int] = []
        self._world = world
        self._others = set(multiprocessing.active_children())
        self._ranks: list[BaseProcess] = []
        self._handed_on = 0
        self._deadline: float | None = None
        self._codes: list[int | None] = []  # before any was ended here
        self._ended_here = False
        self._over_since: float | None = None

    def long_over(self) -> bool:
        """Whether all ended some time ago: the agent would wait for ever for one that ended well without a word."""
        if self._over_since is None and self._ranks and None not in map(_exit_code, self._ranks):
            self._over_since = time.monotonic()
        return self._over_since is not None and time.monotonic() - self._over_since > OVER

    def signal(self, number: int, _: Any) -> None:
        """The handler of this process' signals."""
        self.asked.append(number)

    def look(self) -> None:
        """To be called again and again while the agent runs."""
        if len(self._ranks) < self._world:  # the agent starts them in the order of their ranks
            begun = [process for process in multiprocessing.active_children() if process not in self._others]
            self._ranks = sorted(begun, key=lambda process: int(process.name.rpartition("-")[2]))
        if not self._ended_here:
            self._codes = [_exit_code(process) for process in self._ranks]
        for number in self.asked[self._handed_on :] if self._ranks else ():
            self._hand_on(number)
        if self._deadline is None and (len(self.asked) > 1 or any(self._codes)):
            self._deadline = time.monotonic() + GRACE
        if self._deadline is not None and time.monotonic() > self._deadline:
            self.kill()

    def _hand_on(self, number: int) -> None:
        self._handed_on += 1
        for process in self._ranks:
            if _exit_code(process) is None and process.pid is not None:
                os.kill(process.pid, number)

    def kill(self) -> None:
        """Ends at once what still runs."""
        self._ended_here = True
        for process in self._ranks:
            if _exit_code(process) is None:
                process.kill()

    def failures(self, told: set[int]) -> list[Failure]:
        """Of the processes that ended by themselves and did not say why: killed from outside, or crashed.

        Args:
            told: the ranks that did say.
        """
        # One that still ran was ended here; one that got SIGTERM from the agent was, as another had failed.
        no_reason = (None, 0, SIGNAL_EXIT + signal.SIGTERM)
        ends = enumerate(zip(self._ranks, self._codes, strict=True))
        return [
            failure_of_exit(rank, process.pid, code)
            for rank, (process, code) in ends
            if code not in no_reason and rank not in told
        ]


def _exit_code(process: BaseProcess) -> int | None:
    """What a process ended with; None while it runs.

    It is left to the agent to reap it: of two threads that do, one may find neither the process nor its code.
    """
    if process.pid is None or not hasattr(os, "waitid"):
        return process.exitcode
    try:
        ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # the agent has reaped it
        return process.exitcode
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


@contextmanager
def _signals_to(handler: Callable[[int, Any], None]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in STOPS}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
