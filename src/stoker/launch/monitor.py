"""Watches the heartbeats of running processes: progress, hangs, stragglers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from stoker.errors import RunFailed
from stoker.launch.first_failure import Failure, failure_of_hang
from stoker.launch.run_spec import RunSpec
from stoker.resilience.heartbeat import Listener, Pulse
from stoker.resilience.stack_dumps import ask_for_stacks, waits_for_others
from stoker.resilience.watchdog import WAITED_FOR, Hung, Stragglers, hung
from stoker.runs.run_folder import RunFolder

EVERY = 0.1  # seconds between two looks


class Watch:
    """Watches the heartbeats of one start of the processes.

    Args:
        folder: the run's in shared memory.
        say: prints a message for the user.
        nccl: whether the processes talk through NCCL.
        longest: seconds of the longest evaluation and save of all starts; kept up to date.

    Attributes:
        pulses: the newest heartbeat of each rank that gave one.
        moments: seconds of the monotonic clock at which all processes were seen to live, to have restored their
            state, and to have done a step: ``started``, ``restored``, ``stepped``.
        hung: the process that stopped, once one has.
    """

    def __init__(
        self, spec: RunSpec, folder: Path, *, say: Callable[[str], None], nccl: bool, longest: dict[str, float]
    ) -> None:
        self._spec, self._folder, self._say, self._nccl, self._longest = spec, folder, say, nccl, longest
        self._run = RunFolder(spec.output)
        self._listener = Listener(folder)
        layout = spec.layout
        size = layout.world // layout.pipeline  # the stages of a pipeline have different work
        parts = [range(first, first + size) for first in range(0, layout.world, size)]
        self._stragglers = Stragglers(parts, spec.loaded.job.faults.slow)
        self._looked = 0.0
        self.pulses: dict[int, Pulse] = {}
        self.moments: dict[str, float] = {}
        self.hung: Failure | None = None

    @property
    def done(self) -> int:
        """The last step that some process has finished; -1 before the state was restored."""
        return max((pulse.done for pulse in self.pulses.values()), default=-1)

    @property
    def steps(self) -> int:
        """Steps that the processes did since they were started."""
        return max((pulse.steps for pulse in self.pulses.values()), default=0)

    def silence(self, rank: int, until: float) -> float:
        """Seconds since a rank's last heartbeat; 0 where it gave none."""
        return until - self.pulses[rank].beat if rank in self.pulses else 0.0

    def look(self, pids: Mapping[int, int]) -> Failure | None:
        """The failure of a process that stopped; to be called repeatedly.

        Args:
            pids: of the processes that run, by rank.
        """
        now = time.monotonic()
        if now - self._looked < EVERY:
            return None
        self._looked = now
        self._listen(now)
        for slow in self._stragglers.look(self.pulses):
            self._event(
                "slow",
                rank=slow.rank,
                own=round(slow.own, 4),
                median=round(slow.median, 4),
                steps=[slow.first, slow.last],
            )
            times = slow.own / max(slow.median, 1e-9)
            self._say(f"rank {slow.rank} is slow: its own work takes {times:.1f} times as long as the others'")
        running = {rank: pulse for rank, pulse in self.pulses.items() if rank in pids}
        silent = hung(running, now=now, hang=self._spec.loaded.job.faults.hang, longest=self._longest)
        if silent and self.hung is None:
            self.hung = self._stopped(silent, pids)
        return self.hung

    def close(self) -> None:
        """Looks for the last time."""
        self._listen(time.monotonic())
        self._listener.close()

    def _listen(self, now: float) -> None:
        found = {rank: self._listener.pulse(rank) for rank in range(self._spec.layout.world)}
        self.pulses = {rank: pulse for rank, pulse in found.items() if pulse is not None}
        self._note(now)

    def _note(self, now: float) -> None:
        for phase in WAITED_FOR:
            seen = max((getattr(pulse, phase) for pulse in self.pulses.values()), default=0.0)
            self._longest[phase] = max(self._longest.get(phase, 0.0), seen)
        if len(self.pulses) < self._spec.layout.world:
            return
        pulses = self.pulses.values()
        reached = {
            "started": True,
            "restored": all(pulse.done >= 0 for pulse in pulses),
            "stepped": all(pulse.steps > 0 for pulse in pulses),
        }
        for name in (name for name, is_so in reached.items() if is_so):
            self.moments.setdefault(name, now)

    def _stopped(self, silent: list[Hung], pids: Mapping[int, int]) -> Failure:
        """Saves the stack of every process, and reports the one that the others wait for."""
        logs = self._spec.logs
        stacks = ask_for_stacks(pids, folder=self._folder, logs=logs, collectives=self._nccl)
        behind = [h for h in silent if (h.phase, h.step) == (silent[0].phase, silent[0].step)]
        # Several stopped at the same place: the cause is the one that waits for no other.
        alone = [h for h in behind if not waits_for_others(stacks.texts.get(h.rank, ""))]
        first = (alone or behind)[0]
        self._event(
            "hung",
            rank=first.rank,
            phase=first.phase,
            step=first.step,
            silent=round(first.silent, 1),
            silent_ranks=sorted(h.rank for h in silent),
            files=[path.name for path in stacks.files],
        )
        return failure_of_hang(
            first.rank, pids.get(first.rank), phase=first.phase, step=first.step, silent=first.silent
        )

    def _event(self, name: str, **values: object) -> None:
        record(self._run, name, **values)


def record(run: RunFolder, name: str, **values: object) -> None:
    """Writes an event; a full disk ends nothing here, as the processes may still free space."""
    try:
        run.event(name, **values)
    except RunFailed:
        return
