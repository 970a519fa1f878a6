"""Decides for all nodes of a run: who trains, when the processes start, and what follows when something breaks.

It has no clock and no socket of its own: it is told what happened and when, and answers with messages to nodes. The
leader's own node gets its messages like any other. On one machine it is the whole supervisor, with one node.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from stoker.errors import CannotRun, Problem, RunFailed, UserError
from stoker.launch.first_failure import Failure, Interrupted, error_of, failure_of_hang, first_of
from stoker.launch.monitor import Watch, cause_of, record
from stoker.launch.nodes.agent import pulses_of
from stoker.launch.nodes.channel import Address, Message
from stoker.launch.nodes.group import Group, Member, Node, chosen, placed
from stoker.launch.nodes.outcome import Outcome
from stoker.launch.processes import GRACE
from stoker.launch.restart_policy import Restarts
from stoker.launch.run_spec import RunResult, RunSpec
from stoker.launch.shrink import with_fewer
from stoker.resilience.stop_signals import STOPPING
from stoker.resilience.watchdog import Hung
from stoker.runs.run_folder import RunFolder

JOIN = 30.0  # seconds that further nodes get at the beginning, once the least number is there
RETURN = 5.0  # seconds that the nodes of a group get to come to a new leader
GROW = 3.0  # seconds from a node's arrival until the processes are stopped for it; others may come, too
STACKS = 5.0  # seconds that the nodes get to write the stacks of processes that hang
REMIND = 60.0  # seconds between two lines about nodes that are waited for


@dataclass(frozen=True)
class Hands:
    """What the leader acts through.

    Attributes:
        send: sends a message to a node.
        say: prints a line for the user.
        hold: takes the run's folder; gives the name of a file in it, or None where it is still held elsewhere.
        release: gives the run's folder back: another group may go on, from which this node is cut off.
        store: opens the socket where the processes of several nodes meet; gives its address.
    """

    send: Callable[[str, Message], None]
    say: Callable[[str], None]
    hold: Callable[[], str | None]
    release: Callable[[], None]
    store: Callable[[], Address]


@dataclass
class _Start:
    """One start of the processes."""

    watch: Watch
    ended: dict[str, Message] = field(default_factory=dict)
    lost: list[Member] = field(default_factory=list)
    noticed: float | None = None
    grace: float = math.inf
    hung: Failure | None = None
    silent: list[Hung] = field(default_factory=list)
    stacks: dict[str, Message] = field(default_factory=dict)
    asked_stacks: float | None = None
    paused: float | None = None


@dataclass(frozen=True)
class _Broken:
    """How a start ended: what is reported once the processes are at work again."""

    first: Failure
    watch: Watch
    noticed: float


class Leader:
    """Restarts the processes until they succeed or the restart policy gives up.

    Args:
        spec: the whole job, as it would run with all nodes.
        me: name of this node; empty where it is the only one.
        least, most: nodes to train with.
        nccl: whether the processes talk through NCCL, and devices are GPUs.
        group: the group that this node was in, whose leader has gone.
        lost: the names of nodes that have gone.

    Attributes:
        outcome: how the run ended, once it has.
        group: the one that trains, or did last.
    """

    def __init__(
        self,
        spec: RunSpec,
        hands: Hands,
        *,
        me: Node,
        least: int,
        most: int,
        nccl: bool,
        now: float,
        group: Group | None = None,
        lost: Sequence[str] = (),
    ) -> None:
        self._full = self._spec = spec
        self._hands, self._me, self._least, self._most, self._nccl = hands, me, least, most, nccl
        self._run = RunFolder(spec.output)
        self._restarts = Restarts(spec.loaded.job.faults)
        self._longest: dict[str, float] = {}  # evaluation and save of all starts
        self.nodes: dict[str, Node] = {me.name: me}
        self._since: dict[str, float] = {me.name: now}
        self._signals: dict[str, list[int]] = {}
        self._asked: list[int] = []
        self.group = group
        self.outcome: Outcome | None = None
        self._start: _Start | None = None
        self._broke: _Broken | None = None  # the last start, until the processes are at work again
        self._attempt = 0
        self._ready = now  # when the next start may be, after a back-off
        self._until = now + JOIN  # when it is made with fewer nodes than all
        self._expected: set[str] = set()
        self._reminded = now
        self._gone: list[Member] = []  # with the leader before
        self._grown: tuple[frozenset[str], bool] | None = None
        if group is not None:
            self._take_over(group, lost, now)

    @property
    def spec(self) -> RunSpec:
        """The job as it runs with the nodes of the last start."""
        return self._spec

    # -- what happens ----------------------------------------------------------------------------------------

    def joined(self, node: Node, now: float) -> str:
        """A node has come; returns why it cannot take part, empty where it can."""
        if node.job != self._me.job:
            return (
                f"node {node.name} was given another job than node {self._me.name}; give all nodes the same job file "
                "and the same key=value"
            )
        self.nodes[node.name] = node
        self._since[node.name] = now
        if self._is_multi and self.group is None:
            self._hands.say(f"node {node.name} has come: {len(self.nodes)} of {self._most}")
        return ""

    def left(self, name: str, now: float) -> None:
        """A node has gone."""
        self.nodes.pop(name, None)
        self._signals.pop(name, None)
        self._expected.discard(name)
        start, member = self._start, self.group.member(name) if self.group else None
        if start is not None and member is not None and name not in start.ended:
            start.lost.append(member)
            self._end(start, now, grace=0.0)
            self._decide_if_over(now)

    def message(self, name: str, message: Message, now: float) -> None:
        """A node has something to say."""
        if message["kind"] == "signals":
            self._signalled(name, [int(number) for number in message["numbers"]])
        start = self._start
        if start is None or self.group is None or self.group.member(name) is None:
            return
        match message["kind"]:
            case "pulses":
                start.watch.hear(pulses_of(message, now), now)
                self._tell_restarted(start)
            case "failing":
                self._end(start, now, grace=0.0 if message["killed"] and not self._asked else GRACE)
            case "stacks":
                start.stacks[name] = message
            case "ended":
                start.ended[name] = message
                if message["result"] is None:
                    self._end(start, now, grace=GRACE)
                self._decide_if_over(now)

    def tick(self, now: float) -> None:
        """Does what is due; to be called often."""
        if self.outcome is not None:
            return
        start = self._start
        if start is None:
            self._gather(now)
        elif start.noticed is None:
            self._look(start, now)

    def stop(self, outcome: Outcome) -> None:
        """Ends the run on all nodes, as it ended here."""
        self.outcome = outcome

    @property
    def generation(self) -> int:
        """Of the last start; 0 before the first."""
        return self.group.generation if self.group is not None else 0

    @property
    def is_starting(self) -> bool:
        """Whether no processes run at present."""
        return self._start is None

    # -- gathering -------------------------------------------------------------------------------------------

    @property
    def _is_multi(self) -> bool:
        return bool(self._me.name)

    def _take_over(self, group: Group, lost: Sequence[str], now: float) -> None:
        """Goes on from what the leader before had told."""
        self._until = now + RETURN
        self._expected = {member.node.name for member in group.members} - {*lost, self._me.name}
        self._restarts.restore(group.policy or self._restarts.state())
        self._longest.update(group.longest or {})
        self._attempt = group.generation
        gone = [member for member in group.members if member.node.name in lost]
        if gone:
            self._gone = gone  # an event where this node is the one that goes on
            if len(self.nodes) < self._least:
                self._hands.say(f"{_gone(gone)}")
            first = Failure(gone[0].first, time.time(), "exit", (Problem(_gone(gone)),))
            self._broke = _Broken(first, Watch(self._spec, say=self._hands.say, longest={}), now)

    def _gather(self, now: float) -> None:
        """Starts the processes once there are enough nodes."""
        if self._asked:
            self._over(Interrupted(self._asked[0]))
            return
        regular = [node for node in self.nodes.values() if not node.spare]
        waited = now >= self._until or (self.generation > 0 and self._expected <= self.nodes.keys())
        enough = len(regular) >= self._most or (len(self.nodes) >= self._least and waited)
        if now >= self._ready and enough and self._try_start(now):
            return
        if self._is_multi and len(self.nodes) < self._least:
            self._hands.release()
        if self._is_multi and not enough and now - self._reminded >= REMIND:
            self._reminded = now
            missing = self._least - len(self.nodes)
            if missing > 0:
                self._hands.say(f"waiting for {missing} more node{'s' * (missing > 1)}; {len(self.nodes)} are here")

    def _try_start(self, now: float) -> bool:
        """Starts the processes; returns whether there is a layout for the nodes, and the folder is free."""
        nodes, spec = self._candidates()
        if spec is None:
            return False
        try:
            mark = self._hands.hold()
            if mark is None:
                return False
            spec.logs.mkdir(parents=True, exist_ok=True)
            spec.forget_failures()
        except UserError as error:
            self._over(error)
            return True
        self._spec = spec
        members = placed(nodes, spec.layout.world)
        has_all = spec.loaded.document is self._full.loaded.document
        group = Group(
            self.generation + 1,
            members,
            tuple(node for node in self.nodes.values() if node.name not in {m.node.name for m in members}),
            self._hands.store() if len(members) > 1 else None,
            mark,
            None if has_all else spec.loaded.document.data,
            self._restarts.state(),
            dict(self._longest),
        )
        self.group, self._start = group, _Start(Watch(spec, say=self._hands.say, longest=self._longest))
        self._grown = None
        if self._gone:
            self._note_lost(self._gone, step=max(0, self._restarts.furthest))
            self._gone = []
        if self._is_multi:
            ranks = {m.node.name: [m.first, m.first + m.count - 1] for m in members}
            record(self._run, "group", generation=group.generation, world=group.world, nodes=ranks)
        message = {"kind": "start", "group": group.plain()}
        for name in list(self.nodes):
            self._hands.send(name, message)
        return True

    def _candidates(self) -> tuple[list[Node], RunSpec | None]:
        """The nodes that would train, and the job for them."""
        before = [member.node.name for member in self.group.members] if self.group else []
        nodes = chosen(list(self.nodes.values()), self._most, before=[self._me.name, *before])
        total = sum(len(node.devices) for node in nodes)
        full = self._full
        if total >= full.layout.world:
            return nodes, full
        fewer = with_fewer(full.loaded, full.read or full.loaded.document, devices=None, left=total)
        return nodes, replace(full, loaded=fewer) if fewer is not None else None

    # -- watching --------------------------------------------------------------------------------------------

    def _look(self, start: _Start, now: float) -> None:
        assert self.group is not None
        if start.asked_stacks is not None:
            waited = now - start.asked_stacks >= STACKS
            if waited or all(m.node.name in start.stacks for m in self.group.members):
                self._name_hung(start, now)
            return
        if start.watch.is_due(now):
            running = {rank for m in self.group.members if m.node.name not in start.ended for rank in m.ranks}
            start.silent = start.watch.look(running, now)
        if start.silent:
            start.asked_stacks = now
            for member in self.group.members:
                self._hands.send(member.node.name, {"kind": "stacks"})
        elif self._should_grow(start, now):
            if start.paused is None:
                self._hands.say("a node has come; the processes stop after this step, and go on with it")
            start.paused = now
            for member in self.group.members:
                self._hands.send(member.node.name, {"kind": "pause"})

    def _name_hung(self, start: _Start, now: float) -> None:
        """Reports the process that the others wait for, and has all of them ended."""
        waits = {int(rank) for said in start.stacks.values() for rank in said["waits"]}
        pids = {int(rank): int(pid) for said in start.stacks.values() for rank, pid in said["pids"]}
        first = cause_of(start.silent, waits)
        record(
            self._run,
            "hung",
            rank=first.rank,
            **self._where(first.rank),
            phase=first.phase,
            step=first.step,
            silent=round(first.silent, 1),
            silent_ranks=sorted(h.rank for h in start.silent),
            files=[file for said in start.stacks.values() for file in said["files"]],
        )
        start.hung = failure_of_hang(
            first.rank, pids.get(first.rank), phase=first.phase, step=first.step, silent=first.silent
        )
        self._end(start, now, grace=0.0)

    def _should_grow(self, start: _Start, now: float) -> bool:
        """Whether nodes have come with which a larger layout runs."""
        assert self.group is not None
        if len(self.nodes) <= len(self.group.members) or self._asked or "stepped" not in start.watch.moments:
            return False
        if start.paused is not None:
            return now - start.paused >= GROW  # once more: it may not have been heard
        new = [name for name in self.nodes if self.group.member(name) is None]
        if not new or any(now - self._since[name] < GROW for name in new):
            return False
        names = frozenset(self.nodes)
        if self._grown is None or self._grown[0] != names:
            spec = self._candidates()[1]
            self._grown = names, spec is not None and spec.layout.world > self.group.world
        return self._grown[1]

    def _signalled(self, name: str, numbers: list[int]) -> None:
        """Hands signals on that a node got. A scheduler sends them to every node: they count once."""
        self._signals[name] = numbers
        longest = max(self._signals.values(), key=len)
        if len(longest) > len(self._asked):
            if not self._asked:
                self._hands.say(STOPPING)
            self._asked = list(longest)
            for node in list(self.nodes):
                self._hands.send(node, {"kind": "signal", "numbers": self._asked})

    def _tell_restarted(self, start: _Start) -> None:
        """Reports how long a restart took and where the time went, after the first step."""
        moments = start.watch.moments
        if self._broke is None or "stepped" not in moments:
            return
        broke = self._broke
        seconds = {
            "noticed": broke.watch.silence(broke.first.rank, broke.noticed),
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
            step=min(pulse.done for pulse in start.watch.pulses.values()),
        )
        self._broke = None

    # -- the end of a start ----------------------------------------------------------------------------------

    def _end(self, start: _Start, now: float, *, grace: float) -> None:
        """Has the processes of all nodes ended."""
        assert self.group is not None
        if start.noticed is None:
            start.noticed = now
        if grace >= start.grace:  # they have been told
            return
        start.grace = grace
        for member in self.group.members:
            if member.node.name in self.nodes and member.node.name not in start.ended:
                self._hands.send(member.node.name, {"kind": "end", "grace": grace})

    def _decide_if_over(self, now: float) -> None:
        """Decides what follows, once the processes of all nodes have ended."""
        start, group = self._start, self.group
        assert start is not None and group is not None
        lost = {member.node.name for member in start.lost}
        if any(m.node.name not in start.ended and m.node.name not in lost for m in group.members):
            return
        self._start = None
        results = [start.ended[m.node.name]["result"] for m in group.members if m.node.name in start.ended]
        if not lost and all(result is not None for result in results):
            result = RunResult(**results[0])
            if result.state != "paused":
                self._over(result)
                return
            record(self._run, "regrouped", step=result.step)
            self._attempt += 1
            self._ready = self._until = now
            self._expected = set()
        elif self._asked:
            self._over(Interrupted(self._asked[0]))
        else:
            self._follow_up(start, group, now)

    def _follow_up(self, start: _Start, group: Group, now: float) -> None:
        """What follows a start that failed."""
        said = [Failure.of(values) for ended in start.ended.values() for values in ended["failures"]]
        failures = [start.hung, *said] if start.hung else said
        first = start.hung or (first_of(failures) if failures else None)
        done = max(start.watch.done, 0)
        if start.lost and (first is None or first.consequence):
            first = Failure(start.lost[0].first, time.time(), "exit", (Problem(_gone(start.lost)),))
            failures = [first]
        if start.lost:
            self._note_lost(start.lost, step=done)
        if first is None:
            self._over(RunFailed(f"the processes ended without an outcome; their logs are in {self._spec.logs}"))
            return
        error = error_of(
            [first] if start.hung else failures,
            world=group.world,
            where="" if start.lost else f"its log is {self._spec.log_of(first.rank)}",
        )
        again = self._restarts.after(first, done=start.watch.done, steps=start.watch.steps)
        noticed = start.noticed or now
        self._broke, self._until, self._expected = _Broken(first, start.watch, noticed), now, set()
        try:
            if not start.lost and self._shrink(group, start.ended, error):
                self._attempt += 1
                self._ready = now
                return
        except UserError as refused:
            error, again = refused, None
        if again is None:
            if isinstance(error, RunFailed):
                record(self._run, "failed", step=done, error=f"{first.kind}: {error}")
            self._over(error)
            return
        record(
            self._run,
            "fault",
            rank=first.rank,
            **self._where(first.rank),
            cause=first.kind,
            error=str(first.problems[0]),
            step=done,
            noticed=round(start.watch.silence(first.rank, noticed), 3),
            restart=again.number,
            of=self._restarts.most,
            back_off=again.wait,
        )
        self._hands.say(f"{error}\nstarting again ({again.number} of {self._restarts.most})")
        self._attempt += 1
        self._ready = now + again.wait

    def _note_lost(self, gone: Sequence[Member], *, step: int) -> None:
        for member in gone:
            ranks = [member.first, member.first + member.count - 1]
            record(self._run, "node_lost", node=member.node.name, ranks=ranks, step=step)
        if len(self.nodes) < self._least:
            missing = self._least - len(self.nodes)
            self._hands.say(f"{_gone(gone)}; waiting for {missing} more node{'s' * (missing > 1)}")

    def _shrink(self, group: Group, ended: Mapping[str, Message], error: UserError) -> bool:
        """Continues without lost devices, where the job allows it and others are left."""
        lost = [int(rank) for said in ended.values() for rank in said["out"]]
        if not lost and self._restarts.lost is not None and not isinstance(error, CannotRun):
            lost = [self._restarts.lost]
        if not lost or self._spec.loaded.job.faults.lost != "shrink":
            return False
        layout = self._spec.layout
        if self._is_multi:
            for rank in lost:
                member = group.node_of(rank)
                device = member.node.devices[rank - member.first]
                node = self.nodes[member.node.name]
                left = tuple(number for number in node.devices if number != device)
                self.nodes[node.name] = replace(node, devices=left)
            spec = self._candidates()[1]
        else:
            spec = self._fewer_here(lost)
        if spec is None:
            return False
        self._restarts.reset()
        now = spec.layout
        record(self._run, "shrunk", without=lost, was=layout.describe(), now=now.describe(), why=str(error))
        self._hands.say(f"{error}\ngoing on without: {layout.describe()} is now {now.describe()}")
        return True

    def _fewer_here(self, lost: Sequence[int]) -> RunSpec | None:
        """The job on the only node, without some of its devices."""
        spec, world = self._full, self._full.layout.world
        devices = None
        if self._nccl:
            named = spec.devices or range(world)
            devices = [device for rank, device in enumerate(named) if rank not in lost]
        read = spec.read or spec.loaded.document
        fewer = with_fewer(spec.loaded, read, devices=devices, left=world - len(lost))
        if fewer is None:
            return None
        self._full = replace(spec, loaded=fewer)
        me = self._me
        self.nodes[me.name] = self._me = replace(me, devices=tuple(range(self._full.layout.world)))
        return self._full

    def _where(self, rank: int) -> dict[str, Any]:
        """The node of a rank, for events of several nodes."""
        return {"node": self.group.node_of(rank).node.name} if self._is_multi and self.group else {}

    def _over(self, outcome: Outcome) -> None:
        if isinstance(outcome, Interrupted):
            record(self._run, "interrupted", error=str(outcome))
        self.outcome = outcome


def _gone(members: Sequence[Member]) -> str:
    names = ", ".join(member.node.name for member in members)
    return f"node {names} has gone" if len(members) == 1 else f"nodes {names} have gone"
