"""A leader with a clock of the test's and nodes that only answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stoker.errors import Problem
from stoker.job import load_job
from stoker.job.load_job import with_nodes
from stoker.launch.first_failure import Failure
from stoker.launch.nodes.agent import message_of
from stoker.launch.nodes.group import Group, Node
from stoker.launch.nodes.leader import Leader
from stoker.launch.nodes.leader_effects import LeaderEffects
from stoker.launch.run_spec import RunSpec
from stoker.resilience.heartbeat import Pulse
from stoker.runs.run_folder import RunFolder
from stoker.train.run_result import RunResult

JOB = """
task: module
module: {model: "torch.nn:Linear", loss: "torch.nn:MSELoss", data: "torch:ones"}
steps: 2
train: {batch: 24}
parallel: {data: %d}
faults: {restarts: 2, back_off: 1, hang: 10%s}
"""
RESULT = asdict(RunResult("done", 9, 10, None, 2.0, 1.0, None, None, None, None, True, 0))


def node(name: str, devices: int = 2, *, spare: bool = False, job: str = "") -> Node:
    return Node(name, (f"10.0.0.{ord(name[0]) - 96}", 1), tuple(range(devices)), spare, job)


class Cluster:
    """A leader, and nodes that do what the test says."""

    def __init__(
        self,
        base: Path,
        world: int = 6,
        *,
        least: int = 3,
        most: int = 3,
        more: str = "",
        overrides: Sequence[str] = (),
        **rest: Any,
    ) -> None:
        (base / "job.yaml").write_text(JOB % (world, more))
        loaded = with_nodes(load_job(base / "job.yaml", overrides), most)
        self.spec = RunSpec(loaded, base, base / "run")
        self.spec.output.mkdir(exist_ok=True)
        self.now = 100.0
        self.sent: list[tuple[str, dict[str, Any]]] = []
        self.words: list[str] = []
        self.mark: str | None = ".group-x"
        self.released = 0
        effects = LeaderEffects(
            lambda name, message: self.sent.append((name, message)),
            self.words.append,
            lambda: self.mark,
            self._release,
            lambda first: (first.address[0], 7),
        )
        self.leader = Leader(
            self.spec, effects, me=rest.pop("me", node("a")), least=least, most=most, nccl=False, now=self.now, **rest
        )

    def _release(self) -> None:
        self.released += 1

    def join(self, *nodes: Node) -> None:
        for each in nodes:
            assert self.leader.joined(each, self.now) == ""

    def after(self, seconds: float) -> None:
        self.now += seconds
        self.leader.tick(self.now)

    def take(self, kind: str) -> dict[str, dict[str, Any]]:
        """The messages of a kind since the last look, by node."""
        found = {name: message for name, message in self.sent if message["kind"] == kind}
        self.sent = [(name, message) for name, message in self.sent if message["kind"] != kind]
        return found

    def started(self) -> Group:
        """The group of the start that has just been sent to all."""
        starts = self.take("start")
        assert starts.keys() == self.leader.nodes.keys()
        (group,) = {str(message): Group.of(message["group"]) for message in starts.values()}.values()
        return group

    def says(self, name: str, kind: str, **values: Any) -> None:
        self.leader.message(name, {"kind": kind, **values}, self.now)

    def ended(self, name: str, *failures: Failure, result: dict[str, Any] | None = None) -> None:
        written = [asdict(failure) for failure in failures]
        self.says(name, "ended", result=result, failures=written, gpu_faults=[], out=[])

    def pulses(self, steps: dict[int, int], *, done: int, age: float = 0.0, phase: str = "train") -> None:
        """Heartbeats: the steps that ranks have done since the start."""
        for rank, count in steps.items():
            assert self.leader.group is not None
            name = self.leader.group.node_of(rank).node.name
            pulse = Pulse(self.now - age, phase, done + 1, done, count, 0.1 * count, 0.1, 0.0, 0.0)
            self.says(name, **message_of({rank: pulse}, self.now))

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in RunFolder(self.spec.output).read_events() if event["event"] == name]


def killed(rank: int) -> Failure:
    return Failure(rank, time.time(), "exit", (Problem("process 7 was killed by SIGKILL"),))


def consequence(rank: int) -> Failure:
    problem = Problem("RuntimeError: Connection closed by peer")
    return Failure(rank, time.time() - 60, "RuntimeError", (problem,), consequence=True)


def ranks(group: Group) -> dict[str, list[int]]:
    return {member.node.name: list(member.ranks) for member in group.members}


def fails_test(cluster: Cluster, group: Group, out: list[int], *, everywhere: bool = False) -> None:
    """All processes end, since the node of these ranks does not pass its test, or no node does."""
    bad = group.node_of(out[0]).node.name
    failed = Failure(out[0], time.time(), "CannotRun", (Problem(f"rank {out[0]} on {bad} does not pass its test"),))
    for member in group.members:
        name = member.node.name
        failure = failed if name == bad else consequence(member.first)
        own = list(member.ranks) if everywhere else out if name == bad else []
        cluster.says(name, "ended", result=None, failures=[asdict(failure)], gpu_faults=[], out=own)
