"""One start of the processes on all nodes: the nodes' reports, and its outcome."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from stoker.errors import Problem
from stoker.launch.first_failure import Failure, failure_of_hang, first_of
from stoker.launch.monitor import Watch, cause_of
from stoker.launch.nodes.channel import Message
from stoker.launch.nodes.group import Group, Member
from stoker.resilience.driver_log import GpuFault
from stoker.resilience.watchdog import Hung

STACKS = 5.0  # seconds that the nodes get to write the stacks of processes that hang
LATER = 1.0  # seconds after which the process that hangs is silent too, if those that wait for it were silent first


@dataclass
class RunningStart:
    """A start.

    Attributes:
        ended: the final reports of nodes whose processes have ended, by node.
        lost: nodes that have gone.
        noticed: time at which the end of the start was noticed.
        grace: seconds that its processes were given to end.
        silent: processes that hang, or wait for one that does.
        stacks: the nodes' reports of the processes' stacks, by node.
        asked_stacks: time at which the nodes were asked for stacks.
        hung: the process that the others wait for.
        paused: time at which the processes were last asked to stop after their step.
    """

    watch: Watch
    ended: dict[str, Message] = field(default_factory=dict)
    lost: list[Member] = field(default_factory=list)
    noticed: float | None = None
    grace: float = math.inf
    silent: list[Hung] = field(default_factory=list)
    stacks: dict[str, Message] = field(default_factory=dict)
    asked_stacks: float | None = None
    hung: Failure | None = None
    paused: float | None = None

    def look(self, group: Group, now: float) -> None:
        """Looks for processes that hang."""
        self.silent = [h for h in self.watch.look(now) if group.node_of(h.rank).node.name not in self.ended]

    def has_stacks(self, group: Group, now: float) -> bool:
        """Returns whether the requested stacks have arrived, or their timeout has passed."""
        assert self.asked_stacks is not None
        waited = now - self.asked_stacks
        return waited >= STACKS or (waited >= LATER and all(m.node.name in self.stacks for m in group.members))

    def name_hung(self, group: Group, now: float) -> tuple[Hung, dict[str, Any]]:
        """Finds the process that the others wait for; returns it and the values of an event."""
        before = self.silent
        self.look(group, now)
        self.silent = self.silent or before
        waits = {int(rank) for report in self.stacks.values() for rank in report["waits"]}
        pids = {int(rank): int(pid) for report in self.stacks.values() for rank, pid in report["pids"]}
        first = cause_of(self.silent, waits)
        self.hung = failure_of_hang(
            first.rank, pids.get(first.rank), phase=first.phase, step=first.step, silent=first.silent
        )
        return first, {
            "phase": first.phase,
            "step": first.step,
            "silent": round(first.silent, 1),
            "silent_ranks": sorted(hung.rank for hung in self.silent),
            "files": [file for report in self.stacks.values() for file in report["files"]],
        }

    def is_over(self, group: Group) -> bool:
        """Returns whether the processes of all nodes have ended."""
        lost = {member.node.name for member in self.lost}
        return all(m.node.name in self.ended or m.node.name in lost for m in group.members)

    def gpu_faults(self) -> list[GpuFault]:
        """Returns the faults of GPUs that NVIDIA's driver reported on any node."""
        return [GpuFault.of(values) for report in self.ended.values() for values in report["gpu_faults"] or ()]

    def failures(self) -> tuple[Failure | None, list[Failure]]:
        """Returns the first failure, and all that are to be reported."""
        failures = [Failure.of(values) for ended in self.ended.values() for values in ended["failures"]]
        if self.hung:
            return self.hung, [self.hung]
        first = first_of(failures) if failures else None
        if self.lost and (first is None or first.consequence):
            first = failure_of_lost(self.lost)
            return first, [first]
        return first, failures


@dataclass(frozen=True)
class EndedStart:
    """The outcome of a start, reported once the processes run again."""

    first: Failure
    watch: Watch
    noticed: float

    def restarted(self, watch: Watch) -> dict[str, Any]:
        """Returns the values of the event of a restart: its duration and that of each phase.

        Args:
            watch: that of the start after this one, whose processes have done their first step.
        """
        moments = watch.moments
        seconds = {
            "noticed": self.watch.silence(self.first.rank, self.noticed),
            "started": moments["started"] - self.noticed,
            "restored": moments["restored"] - moments["started"],
            "stepped": moments["stepped"] - moments["restored"],
        }
        return {
            "seconds": round(sum(seconds.values()), 3),
            "split": {name: round(value, 3) for name, value in seconds.items()},
            "step": min(pulse.done for pulse in watch.pulses.values()),
        }


def failure_of_lost(members: Sequence[Member]) -> Failure:
    """Returns the failure caused by lost nodes."""
    return Failure(members[0].first, time.time(), "exit", (Problem(lost_message(members)),))


def lost_message(members: Sequence[Member]) -> str:
    """Returns the message about lost nodes."""
    names = ", ".join(member.node.name for member in members)
    return f"node {names} has gone" if len(members) == 1 else f"nodes {names} have gone"
