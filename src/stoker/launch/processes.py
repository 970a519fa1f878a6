"""The processes of one start of a run, begun by the torch elastic agent: handed signals, looked at, ended."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import signal
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from stoker.launch.child import Entry, main
from stoker.launch.failure import Failure, failure_of_exit
from stoker.launch.server import START
from stoker.launch.work import Ending, Work
from stoker.resilience.deadline import SIGNAL_EXIT
from stoker.resilience.stop import STOPS

POLL = 0.05  # seconds between two looks at the processes
OVER = 30.0  # seconds that the agent gets to see that all processes have ended
GRACE = 3.0  # seconds that the others get to end by themselves when one has failed, or when all are to end at once
READ = 0.2  # seconds in which the agent has read how a process ended


class Agent(threading.Thread):
    """The elastic agent, in a thread of its own: in the main thread it would take the signals for itself.

    Attributes:
        endings: by rank, where all ended well.
        error: else.
    """

    def __init__(self, work: Work, entry: Entry | None) -> None:
        super().__init__(name="elastic-agent", daemon=True)
        self._arguments = (work, pickle.dumps(entry) if entry else None, os.getpid() if START == "spawn" else None)
        self._config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=work.layout.world,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,  # whether the processes are started again, and how many, is decided above
            monitor_interval=POLL,
            start_method=START,
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


class Processes:
    """The agent's processes: hands signals on to them, and ends what is left when one of them has failed.

    Args:
        asked: signals that this process got, as they come.
        others: the children that this process had before.

    Attributes:
        settled: whether the agent is over: nobody else reads how the processes ended.
    """

    settled = False

    def __init__(self, world: int, *, asked: Sequence[int], others: set[BaseProcess]) -> None:
        self._world, self._asked, self._others = world, asked, others
        self._ranks: list[BaseProcess] = []
        self._handed_on = 0
        self._deadline: float | None = None
        self._codes: list[int | None] = []  # before any was ended here
        self._ended_here = False
        self._over_since: float | None = None
        self._seen: dict[int, float] = {}  # when a process was first seen to have ended, by its id

    @property
    def pids(self) -> dict[int, int]:
        """Of the processes that run, by rank."""
        living = [(rank, p.pid) for rank, p in enumerate(self._ranks) if self._exit_code(p) is None]
        return {rank: pid for rank, pid in living if pid is not None}

    @property
    def one_has_failed(self) -> bool:
        """Whether one ended by itself, and not well."""
        return any(self._codes)

    def long_over(self) -> bool:
        """Whether all ended some time ago: the agent would wait for ever for one that ended well without a word."""
        if self._over_since is None and self._ranks and None not in map(self._exit_code, self._ranks):
            self._over_since = time.monotonic()
        return self._over_since is not None and time.monotonic() - self._over_since > OVER

    def look(self) -> None:
        """To be called again and again while the agent runs."""
        if len(self._ranks) < self._world:  # the agent starts them in the order of their ranks
            begun = [process for process in multiprocessing.active_children() if process not in self._others]
            self._ranks = sorted(begun, key=lambda process: int(process.name.rpartition("-")[2]))
        if not self._ended_here:
            self._codes = [self._exit_code(process) for process in self._ranks]
        for number in self._asked[self._handed_on :] if self._ranks else ():
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
        """Ends at once what still runs."""
        self._ended_here = True
        for process in self._ranks:
            if self._exit_code(process) is None:
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

    def _exit_code(self, process: BaseProcess) -> int | None:
        """What a process ended with; None while it runs.

        It is left to the agent to reap it: of two threads that do, one may find neither the process nor its code.
        """
        if process.pid is None or not hasattr(os, "waitid"):
            return process.exitcode
        try:
            ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # the server's child, or one that the agent has reaped
            return self._exit_code_told(process)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def _exit_code_told(self, process: BaseProcess) -> int | None:
        """The code that a server of forks tells once, a moment after it has told the agent."""
        assert process.pid is not None
        if process.pid not in self._seen:
            if not wait([process.sentinel], 0):
                return None
            self._seen[process.pid] = time.monotonic()
        told = self.settled or time.monotonic() - self._seen[process.pid] > READ
        return process.exitcode if told else None
