"""Watches the heartbeats of running processes, of one node or of several: progress, hangs, stragglers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from operator import attrgetter

from stoker.errors import RunFailed
from stoker.launch.run_spec import RunSpec
from stoker.resilience.heartbeat import Pulse
from stoker.resilience.watchdog import WAITED_FOR, Hung, Stragglers, hung
from stoker.runs.run_folder import RunFolder

EVERY = 0.1  # seconds between two looks
LOOKED_AT = 2_000  # heartbeats a second that are looked at, at most: with many processes the looks are fewer


class Watch:
    """Watches the heartbeats of one start of the processes.

    Args:
        say: prints a message for the user.
        longest: seconds of the longest evaluation and save of all starts; kept up to date.

    Attributes:
        pulses: the newest heartbeat of each rank that sent one, in this machine's monotonic clock.
        moments: seconds of that clock at which all processes had sent a heartbeat, had restored their
            state, and had done a step: ``started``, ``restored``, ``stepped``.
    """

    def __init__(self, spec: RunSpec, *, say: Callable[[str], None], longest: dict[str, float]) -> None:
        self._spec, self._say, self._longest = spec, say, longest
        self._run = RunFolder(spec.output)
        layout = spec.layout
        self._world = layout.world
        size = layout.world // layout.pipeline  # the stages of a pipeline have different work
        parts = [range(first, first + size) for first in range(0, layout.world, size)]
        self._stragglers = Stragglers(parts, spec.loaded.job.faults.slow)
        self._every = max(EVERY, layout.world / LOOKED_AT)
        self._looked = 0.0
        self._restored: set[int] = set()
        self._stepped: set[int] = set()
        self.pulses: dict[int, Pulse] = {}
        self.moments: dict[str, float] = {}

    @property
    def done(self) -> int:
        """The last step that some process has finished; -1 before the state was restored."""
        return max((pulse.done for pulse in self.pulses.values()), default=-1)

    @property
    def steps(self) -> int:
        """Steps that the processes did since they were started."""
        return max((pulse.steps for pulse in self.pulses.values()), default=0)

    def silence(self, rank: int, until: float) -> float:
        """Seconds since a rank's last heartbeat; 0 if it gave none."""
        return until - self.pulses[rank].beat if rank in self.pulses else 0.0

    def hear(self, pulses: Mapping[int, Pulse], now: float) -> None:
        """Takes over new heartbeats."""
        self.pulses |= pulses
        for phase in WAITED_FOR:
            seen = map(attrgetter(phase), pulses.values())
            self._longest[phase] = max([self._longest.get(phase, 0.0), *seen])
        if "stepped" in self.moments:
            return
        self._restored.update(rank for rank, pulse in pulses.items() if pulse.done >= 0)
        self._stepped.update(rank for rank, pulse in pulses.items() if pulse.steps > 0)
        reached = {"started": self.pulses, "restored": self._restored, "stepped": self._stepped}
        for name in (name for name, ranks in reached.items() if len(ranks) == self._world):
            self.moments.setdefault(name, now)

    def look(self, now: float) -> list[Hung]:
        """Returns the processes that are silent, those that have ended among them; reports stragglers.

        To be called repeatedly.
        """
        if now - self._looked < self._every:
            return []
        self._looked = now
        for slow in self._stragglers.look(self.pulses):
            write_event(
                self._run,
                "slow",
                rank=slow.rank,
                own=round(slow.own, 4),
                median=round(slow.median, 4),
                steps=[slow.first, slow.last],
            )
            times = slow.own / max(slow.median, 1e-9)
            self._say(f"rank {slow.rank} is slow: its own work takes {times:.1f} times as long as the others'")
        return hung(self.pulses, now=now, hang=self._spec.loaded.job.faults.hang, longest=self._longest)


def cause_of(silent: list[Hung], waits: Collection[int]) -> Hung:
    """Returns the process that the others wait for.

    Args:
        silent: as `Watch.look` gives them.
        waits: ranks whose stack shows that they wait for others.
    """
    behind = [h for h in silent if (h.phase, h.step) == (silent[0].phase, silent[0].step)]
    # Several stopped at the same place: the cause is the one that waits for no other.
    alone = [h for h in behind if h.rank not in waits]
    return (alone or behind)[0]


def write_event(run: RunFolder, name: str, **values: object) -> None:
    """Writes an event; a full disk is ignored here, as the processes may still free space."""
    try:
        run.event(name, **values)
    except RunFailed:
        return
