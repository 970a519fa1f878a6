"""The protocol of targets, and the module of each target."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Literal, Protocol

from stoker.cluster.chosen_target import ChosenTarget
from stoker.cluster.record import Record
from stoker.cluster.submission import Submission

State = Literal["waiting", "running", "done", "stopped", "failed", "lost"]

# The module of each kind, which has `open_target(chosen: ChosenTarget) -> Target`. Imported when a job needs it.
MODULES = {
    "ssh": "stoker.cluster.ssh.ssh_target",
    "slurm": "stoker.cluster.slurm.slurm_target",
    "ray": "stoker.cluster.ray.ray_target",
    "kubernetes": "stoker.cluster.kubernetes.kubernetes_target",
}


@dataclass(frozen=True)
class Status:
    """The state of a submitted job, from its target.

    Attributes:
        state: ``waiting`` (for the scheduler), ``running``, ``done``, ``stopped``, ``failed``, or ``lost``: the target
            no longer knows it.
        why: the reason, as text; empty if there is none.
        nodes: where it runs.
        unreached: hosts that could not be asked, on which it may be running.
    """

    state: State
    why: str = ""
    nodes: Sequence[str] = ()
    unreached: Sequence[str] = ()

    @property
    def is_active(self) -> bool:
        """Whether the job waits or runs."""
        return self.state in ("waiting", "running")


class Target(Protocol):
    """A place where jobs run. Errors are `stoker.errors.UserError`: 2 wrong input, 3 cannot be scheduled."""

    def host_count(self) -> int | None:
        """Returns the number of hosts, if the target knows it: the default number of nodes."""

    def check(self, submission: Submission) -> None:
        """Raises UserError with every problem that can be found before anything is sent or started."""

    def preview(self, submission: Submission) -> str:
        """Returns exactly the text that `submit` would send, without sending it, for `--dry-run`."""

    def submit(self, submission: Submission) -> Record:
        """Sends the job and starts it; returns its record, which the caller saves.

        Targets whose start may be interrupted halfway save the record themselves, as soon as it has what `stop` needs.
        """

    def status(self, record: Record) -> Status:
        """Returns the job's state."""

    def logs(self, record: Record, *, rank: int | None, follow: bool) -> Iterator[str]:
        """Yields lines of its logs, without line ends: of one rank, or of all with the rank before each line.

        Args:
            follow: continue until the job has ended.
        """

    def stop(self, record: Record) -> None:
        """Ends it on every node, after it has saved.

        Raises:
            RunFailed: it may be running on nodes that do not answer; the others have ended.
        """

    def resume(self, record: Record) -> Record:
        """Starts it again from its newest state; the new record."""

    def describe(self, record: Record) -> Iterator[str]:
        """Lines on it: nodes, states, reasons, where its files are."""

    def records(self) -> Sequence[Record]:
        """Returns the target's own records, so that the jobs are found from any machine."""


def open_target(chosen: ChosenTarget) -> Target:
    """Returns the target of a block."""
    target: Target = import_module(MODULES[chosen.kind]).open_target(chosen)
    return target
