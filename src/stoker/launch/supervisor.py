"""Starts a run's processes on this machine, restarts them after a failure, and reports how they ended."""

from __future__ import annotations

import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from stoker.errors import CannotRun, RunFailed, UserError
from stoker.launch.first_failure import Failure, Interrupted, error_of, first_of
from stoker.launch.forkserver import start_server
from stoker.launch.monitor import Watch, record
from stoker.launch.processes import Processes
from stoker.launch.restart_policy import Restarts
from stoker.launch.run_spec import RunResult, RunSpec
from stoker.launch.shrink import left_out, with_fewer
from stoker.launch.worker_main import Entry, has_nccl
from stoker.resilience.deadline import seconds_left
from stoker.resilience.stop_signals import STOPPING, handled_by
from stoker.runs.run_folder import RunFolder
from stoker.runs.shm_folder import SharedFolder, shared_memory
from stoker.terminal import unescaped

POLL = 0.05  # seconds between two looks at the processes
SHOW_CURSOR = "\x1b[?25h"


def train_here(spec: RunSpec, entry: Entry | None = None) -> RunResult:
    """Trains in as many processes as the layout has; the caller holds the run's folder.

    A process that dies or stops ends the others, and all are started again from the newest state, as the job's
    `faults` says. The first SIGINT or SIGTERM is handed on to all of them, which stop after their step; a second
    ends them, and so does the deadline after a SIGTERM.

    Args:
        entry: what each process calls instead of training.

    Raises:
        UserError: a process raised one; of the same class, with the same message.
        RankFailed: a process met a bug or was killed.
        Interrupted: a signal ended the processes before they had an outcome.
    """
    spec.logs.mkdir(parents=True, exist_ok=True)
    asked: list[int] = []

    def ask(number: int, _: Any) -> None:
        if not asked:
            tell(spec, STOPPING)
        asked.append(number)

    with shared_memory(spec.output) as shared, handled_by(ask):
        start_server()
        return _Supervisor(spec, entry, shared, asked).run()


def tell(spec: RunSpec, text: str) -> None:
    """Prints a message without breaking the live progress line."""
    if not spec.quiet:
        if sys.stdout.isatty():
            unescaped(sys.stdout).write("\r\x1b[2K")
        with suppress(BrokenPipeError):  # the reader has gone; the run has not
            print(text, flush=True)


@dataclass(frozen=True)
class _Broken:
    """How a start of the processes failed: all failures, and what the monitor saw."""

    failures: list[Failure]
    watch: Watch
    noticed: float


class _Supervisor:
    """Restarts the processes until they succeed or the restart policy gives up."""

    def __init__(self, spec: RunSpec, entry: Entry | None, shared: SharedFolder, asked: list[int]) -> None:
        self._spec, self._entry, self._shared, self._asked = spec, entry, shared, asked
        self._run = RunFolder(spec.output)
        self._restarts = Restarts(spec.loaded.job.faults)
        self._nccl = has_nccl()
        self._deadline: float | None = None
        self._longest: dict[str, float] = {}  # evaluation and save of all starts
        self._broke: _Broken | None = None  # the last start, until the processes are at work again
        self._attempt = 0

    def run(self) -> RunResult:
        while True:
            try:
                ended = self._start()
            except Interrupted as interrupted:
                record(self._run, "interrupted", error=str(interrupted))
                raise
            if isinstance(ended, RunResult):
                return ended
            failures, world, done = ended.failures, self._spec.layout.world, max(ended.watch.done, 0)
            first = first_of(failures)
            log = self._spec.log_of(first.rank)
            error = error_of(failures, world=world, where=f"its log is {log}")
            again = self._restarts.after(first, done=ended.watch.done, steps=ended.watch.steps)
            if self._shrink(error):
                self._broke, self._attempt = ended, self._attempt + 1
                continue
            if again is None:
                self._show_cursor()
                if isinstance(error, RunFailed):
                    record(self._run, "failed", step=done, error=f"{first.kind}: {error}")
                raise error
            record(
                self._run,
                "fault",
                rank=first.rank,
                cause=first.kind,
                error=str(first.problems[0]),
                step=done,
                noticed=round(ended.watch.silence(first.rank, ended.noticed), 3),
                restart=again.number,
                of=self._restarts.most,
                back_off=again.wait,
            )
            self._say(f"{error}\nstarting again ({again.number} of {self._restarts.most})")
            self._broke, self._attempt = ended, self._attempt + 1
            self._wait(again.wait)

    def _shrink(self, error: UserError) -> bool:
        """Continues without lost devices, where the job allows it and others are left."""
        lost = left_out(self._spec)
        if not lost and self._restarts.lost is not None and not isinstance(error, CannotRun):
            lost = [self._restarts.lost]
        if not lost or self._spec.loaded.job.faults.lost != "shrink":
            return False
        layout = self._spec.layout
        devices = None
        if self._nccl:
            named = self._spec.devices or range(layout.world)
            devices = [device for rank, device in enumerate(named) if rank not in lost]
        read = self._spec.read or self._spec.loaded.document
        fewer = with_fewer(self._spec.loaded, read, devices=devices, left=layout.world - len(lost))
        if fewer is None:
            return False
        self._spec = replace(self._spec, loaded=fewer)
        self._restarts.reset()
        now = self._spec.layout
        record(self._run, "shrunk", without=lost, was=layout.describe(), now=now.describe(), why=str(error))
        self._say(f"{error}\ngoing on without: {layout.describe()} is now {now.describe()}")
        return True

    def _start(self) -> RunResult | _Broken:
        """Starts the processes once and watches them to their end."""
        spec = self._spec
        spec.forget_failures()
        self._shared.keep()
        for left in self._shared.path.glob("heart-*"):
            left.unlink()
        watch = Watch(spec, self._shared.path, say=self._say, nccl=self._nccl, longest=self._longest)
        meet = self._shared.path / f"meet-{self._attempt}"
        processes = Processes(spec, self._entry, meet=meet, asked=self._asked)
        noticed = None
        try:
            processes.start()
            while processes.pids:
                processes.look()
                self._shared.keep()
                if watch.look(processes.pids) is not None or self._is_late():
                    processes.kill()
                if noticed is None and (processes.one_has_failed or watch.hung):
                    noticed = time.monotonic()
                self._tell_restarted(watch)
                processes.wait(POLL)
            processes.look()
        finally:
            processes.kill()
            watch.close()
        ending = processes.ending()
        if ending is not None:
            return ending
        if self._asked:
            raise Interrupted(self._asked[0])
        failures = [watch.hung] if watch.hung else spec.failures()
        failures += processes.failures({failure.rank for failure in failures})
        if not failures:
            raise RunFailed(f"the processes ended without an outcome; their logs are in {spec.logs}")
        return _Broken(failures, watch, noticed or time.monotonic())

    def _is_late(self) -> bool:
        """Whether the deadline after a SIGTERM has come: what is saved by now counts."""
        if signal.SIGTERM not in self._asked:
            return False
        if self._deadline is None:
            self._deadline = time.monotonic() + seconds_left(self._spec.loaded.job.faults)
        return time.monotonic() > self._deadline

    def _tell_restarted(self, watch: Watch) -> None:
        """Reports how long a restart took and where the time went, after the first step."""
        if self._broke is None or "stepped" not in watch.moments:
            return
        broke, moments = self._broke, watch.moments
        first = first_of(broke.failures)
        seconds = {
            "noticed": broke.watch.silence(first.rank, broke.noticed),
            "started": moments["started"] - broke.noticed,
            "restored": moments["restored"] - moments["started"],
            "stepped": moments["stepped"] - moments["restored"],
        }
        record(
            self._run,
            "restarted",
            attempt=self._attempt,
            seconds=round(sum(seconds.values()), 3),
            split={name: round(value, 3) for name, value in seconds.items()},
            step=min(pulse.done for pulse in watch.pulses.values()),
        )
        self._broke = None

    def _wait(self, seconds: float) -> None:
        """Waits before a restart; a signal ends the run."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self._asked:
                raise Interrupted(self._asked[0])
            time.sleep(min(POLL, seconds))

    def _say(self, text: str) -> None:
        tell(self._spec, text)

    def _show_cursor(self) -> None:
        """The live line of a process that was killed had hidden it."""
        if sys.stdout.isatty():
            unescaped(sys.stdout).write(SHOW_CURSOR)
            sys.stdout.flush()
