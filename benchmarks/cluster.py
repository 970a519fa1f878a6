"""What the supervisors of many nodes cost: the real protocol between them, and processes that only sleep.

    python benchmarks/cluster.py --nodes 1000

The nodes are supervisors in a few processes of this machine, each with its own port, its own connections and its own
turn; the leading one has a process of its own. Only what starts processes is replaced: each node has eight
"processes" that give a heartbeat for every step. The nodes of one process share what they read of a group, as
hundreds of nodes have one processor here; what reading it takes a node is measured by itself. Measured: the seconds
until all nodes train; the seconds from a failure on one node until all nodes have been told to start again, with the
failure's own grace; the processor time of the leader and of a follower, as a share of one core.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import secrets
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from stoker.errors import Problem
from stoker.job import load_job
from stoker.launch.first_failure import Failure
from stoker.launch.nodes import channel
from stoker.launch.nodes.agent import Agent, ended_message, interval, message_of
from stoker.launch.nodes.cache_exchange import CacheServer
from stoker.launch.nodes.channel import STRANGERS, Address, PeerNetwork
from stoker.launch.nodes.group import Group, Node, assign_ranks
from stoker.launch.nodes.node_part import NodePart
from stoker.launch.nodes.node_supervisor import NodeSupervisor, poll_interval
from stoker.launch.nodes.place import Place
from stoker.launch.run_spec import RunSpec
from stoker.resilience.heartbeat import Pulse

DEVICES = 8
LONG = 4096  # bytes from which a message is one that all nodes get
STEP = 1.0  # seconds of a step that is slept
STARTS = 0.2  # seconds from the start of a node's "processes" to their first step
TURN = 0.05  # seconds between two turns of a follower, as in `stoker node`
STEADY = 30.0  # seconds over which the processor's time is taken
HOST = "127.0.0.1"
JOB = """
task: module
module: {model: "torch.nn:Linear", loss: "torch.nn:MSELoss", data: "torch:ones"}
steps: 1000000
train: {batch: %d}
parallel: {data: %d}
faults: {back_off: 0, nodes: {min: %d, max: %d}}
"""


class Asleep(Agent):
    """The processes of a node that only sleep."""

    def __init__(self, supervisor: SimulatedNode) -> None:
        self._node = supervisor
        self.group: Group | None = None
        self.began = self._reported = 0.0
        self.runs = False
        self.first_step = 0

    def begin(self, group: Group, now: float) -> None:
        self.group, self.began, self._reported, self.runs = group, now, 0.0, True
        member = group.member(self._node.name)
        assert member is not None
        self.ranks = member.ranks
        self.every = interval(len(group.members))

    def look(self, now: float) -> None:
        if not self.runs or now - self._reported < self.every or now - self.began < STARTS:
            return
        self._reported = now
        steps = 1 + int((now - self.began) / STEP)
        pulse = Pulse(now - 0.01, "train", steps + 1, steps, steps, 0.5 * steps, STEP, 0.0, 0.0)
        self._node.report(message_of(dict.fromkeys(self.ranks, pulse), now))

    def fail(self) -> None:
        """A process of this node is killed."""
        self._node.report({"kind": "failing", "killed": True})
        failure = Failure(self.ranks[0], time.time(), "exit", (Problem("process 7 was killed by SIGKILL"),))
        self._ended([asdict(failure)])

    def end(self, grace: float) -> None:
        if self.runs:
            self._ended([])

    def _ended(self, failures: list[dict[str, Any]]) -> None:
        self.runs = False
        self._node.report(ended_message(failures=failures))

    def abandon(self) -> None:
        self.runs = False

    def pause(self) -> None: ...

    def stacks(self) -> None: ...

    def hand_on(self, numbers: object) -> None: ...


@contextmanager
def folder_taken() -> Iterator[bool]:
    yield True


class SleepingPart(NodePart):
    """The part of a supervisor whose processes only sleep."""

    def _start_pending(self, now: float) -> None:
        if self._pending is not None:
            group, _ = self._pending
            self._pending = None
            if self._store is not None:
                self._store.close()
                self._store = None
            assert isinstance(self._agent, Asleep)
            self._agent.begin(group, now)


class SimulatedNode(NodeSupervisor):
    """A supervisor whose processes only sleep."""

    def __init__(self, spec: RunSpec, name: str, leader: Address | None, count: int, secret: bytes) -> None:
        network = PeerNetwork((HOST, 0), secret, strangers=max(STRANGERS, 2 * count))
        node = Node(name, network.address, tuple(range(DEVICES)))
        place = Place(node, (leader or network.address,), count, count, secret)
        self.name, self.address = name, network.address
        super().__init__(
            spec,
            place,
            network,
            asked=[],
            take=folder_taken,
            say=lambda _: None,
            nccl=False,
            cache=CacheServer([]),
        )
        self._asleep = Asleep(self)
        self._part = SleepingPart(
            spec,
            place,
            self._folder,
            self._asleep,  # type: ignore[arg-type]
            address=network.address[0],
            tell=self._tell,
            say=lambda _: None,
        )
        self._seek(time.monotonic())

    def report(self, message: dict[str, Any]) -> None:
        self._tell(message)

    def turn(self, wait: float) -> None:
        self._turn(wait)

    @property
    def generation(self) -> int:
        """Of the start whose processes run; 0 while none do."""
        return self._asleep.group.generation if self._asleep.runs and self._asleep.group else 0

    @property
    def all_stepped(self) -> bool:
        """Of the leader: whether it has heard that every process has done a step."""
        leader = self._leader
        return leader is not None and leader._start is not None and "stepped" in leader._start.watch.moments

    def fail(self) -> None:
        self._asleep.fail()


def share_groups() -> None:
    """A group is read once in this process, and not by each of its nodes."""
    read, kept = Group.of, dict[int, Group]()

    def of(values: dict[str, Any]) -> Group:
        generation = int(values["generation"])
        if generation not in kept:
            kept[generation] = read(values)
        return kept[generation]

    decode, decoded = json.loads, dict[str, Any]()

    def loads(text: str) -> Any:
        if len(text) < LONG:
            return decode(text)
        if text not in decoded:
            decoded[text] = decode(text)
        return decoded[text]

    Group.of = staticmethod(of)  # type: ignore[assignment,method-assign]
    channel.json = SimpleNamespace(loads=loads, dumps=json.dumps)  # type: ignore[assignment]


def reading_time(count: int) -> float:
    """Seconds in which a node reads a group."""
    nodes = [Node(f"node-{number}", (HOST, 29400), tuple(range(DEVICES))) for number in range(count)]
    text = json.dumps(Group(1, assign_ranks(nodes, count * DEVICES)).plain())
    begin = time.perf_counter()
    Group.of(json.loads(text))  # in the process that started the others, where nothing is shared
    return time.perf_counter() - begin


def keep(
    control: Connection, spec: RunSpec, names: list[str], leader: Address | None, count: int, secret: bytes
) -> None:
    """A process with some of the nodes; ``control`` asks and is answered."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    share_groups()
    nodes = [SimulatedNode(spec, name, leader, count, secret) for name in names]
    control.send(nodes[0].address)
    reached: dict[int, float] = {}
    while True:
        begin = time.monotonic()
        for node in nodes:
            node.turn(0.0)
        now = time.monotonic()
        for generation in range(1, min(node.generation for node in nodes) + 1):
            reached.setdefault(generation, now)
        if control.poll():
            match control.recv():
                case "state":
                    used = resource.getrusage(resource.RUSAGE_SELF)
                    stepped = nodes[0].all_stepped
                    control.send({"reached": reached, "stepped": stepped, "cpu": used.ru_utime + used.ru_stime})
                case "fail":
                    nodes[-1].fail()
                case "end":
                    return
        rest = max(TURN, poll_interval(count - 1)) if leader is None else TURN
        time.sleep(max(0.0, rest - (time.monotonic() - begin)))


def ask(controls: list[Connection]) -> list[dict[str, Any]]:
    for control in controls:
        control.send("state")
    return [control.recv() for control in controls]


def wait_for(controls: list[Connection], generation: int, seconds: float = 300.0) -> float:
    """When all nodes had started a generation, by the machine's monotonic clock."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        states = ask(controls)
        if all(generation in state["reached"] for state in states) and states[0]["stepped"]:
            return max(state["reached"][generation] for state in states)
        time.sleep(0.2)
    raise TimeoutError(f"generation {generation} was not reached")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=2, help="that the followers are spread over")
    parser.add_argument("--steady", type=float, default=STEADY, help="seconds over which processor time is taken")
    arguments = parser.parse_args()
    count = arguments.nodes
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        world = count * DEVICES
        (base / "job.yaml").write_text(JOB % (world, world, count, count))
        (base / "run").mkdir()
        spec = RunSpec(load_job(base / "job.yaml"), base, base / "run", quiet=True)
        secret = secrets.token_bytes(32)
        context = multiprocessing.get_context("fork")
        controls: list[Connection] = []
        workers = []

        def begin(names: list[str], leader: Address | None) -> Address:
            ours, theirs = context.Pipe()
            worker = context.Process(target=keep, args=(theirs, spec, names, leader, count, secret), daemon=True)
            worker.start()
            workers.append(worker)
            controls.append(ours)
            address: Address = ours.recv()
            return address

        began = time.monotonic()
        leader = begin(["node-0"], None)
        others = [f"node-{number}" for number in range(1, count)]
        for part in range(arguments.processes):
            if names := others[part :: arguments.processes]:
                begin(names, leader)
        formed = wait_for(controls, 1) - began
        before, at = ask(controls), time.monotonic()
        time.sleep(arguments.steady)
        after, passed = ask(controls), time.monotonic() - at
        shares = [(b["cpu"] - a["cpu"]) / passed for a, b in zip(before, after, strict=True)]
        failed = time.monotonic()
        controls[-1].send("fail")
        agreed = wait_for(controls, 2) - failed
        for control in controls:
            control.send("end")
        print(
            json.dumps(
                {
                    "nodes": count,
                    "processes": world,
                    "formed_s": round(formed, 2),
                    "restart_agreed_s": round(agreed, 2),
                    "leader_core_percent": round(100 * shares[0], 2),
                    "follower_core_percent": round(100 * sum(shares[1:]) / (count - 1), 3),
                    "reports_every_s": interval(count),
                    "group_read_s": round(reading_time(count), 4),
                }
            )
        )


if __name__ == "__main__":
    main()
