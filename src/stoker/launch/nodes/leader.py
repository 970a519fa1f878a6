"""The leader of a run's nodes: decides which of them train, when the processes start, and how faults are handled.

It has no clock and no socket of its own: its methods are called with each event and its time, and it sends messages to
the nodes. The leader's own node receives them like any other. On one machine it is the whole supervisor, with one node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stoker.errors import CannotRun, Interrupted, Problem, RunFailed, UserError
from stoker.launch.first_failure import error_of
from stoker.launch.monitor import Watch, write_event
from stoker.launch.nodes.agent import interval, pulses_of
from stoker.launch.nodes.channel import Address, Message
from stoker.launch.nodes.group import Group, Member, Node, assign_ranks
from stoker.launch.nodes.leader_effects import LeaderEffects
from stoker.launch.nodes.outcome import Outcome
from stoker.launch.nodes.roster import SETTLED, Roster
from stoker.launch.nodes.running_start import EndedStart, RunningStart, failure_of_lost, lost_message
from stoker.launch.processes import GRACE
from stoker.launch.restart_policy import Restarts
from stoker.launch.run_spec import RunSpec
from stoker.resilience.driver_log import UNREADABLE
from stoker.resilience.stop_signals import STOPPED_BEFORE, STOPPING
from stoker.runs.run_folder import RunFolder
from stoker.train.run_result import RunResult

JOIN = 30.0  # seconds to wait for further nodes at the beginning, once the minimum is reached
RETURN = 5.0  # seconds that the nodes of a group get to join a new leader
REMIND = 60.0  # seconds between two lines about what a start waits for


class Leader:
    """Restarts the processes until they succeed or the restart policy gives up.

    Args:
        spec: the whole job, as it would run with all nodes.
        me: name of this node; empty if it is the only one.
        least, most: nodes to train with.
        nccl: whether the processes talk through NCCL, and devices are GPUs.
        rendezvous: addresses at which nodes are expected.
        group: the group that this node was in, whose leader is lost.
        lost: the names of nodes that have gone.

    Attributes:
        outcome: how the run ended, once it has.
        group: the one that trains, or did last.
    """

    def __init__(
        self,
        spec: RunSpec,
        effects: LeaderEffects,
        *,
        me: Node,
        least: int,
        most: int,
        nccl: bool,
        now: float,
        rendezvous: Sequence[Address] = (),
        group: Group | None = None,
        lost: Sequence[str] = (),
    ) -> None:
        self._spec = spec
        self._effects, self._least, self._most = effects, least, most
        self._roster = Roster(spec, me, most=most, nccl=nccl, now=now, rendezvous=rendezvous)
        self._run = RunFolder(spec.output)
        self._restarts = Restarts(spec.loaded.job.faults)
        self._longest: dict[str, float] = {}  # evaluation and save of all starts
        self._signals: dict[str, list[int]] = {}
        self._asked: list[int] = []
        self.group = group
        self.outcome: Outcome | None = None
        self._start: RunningStart | None = None
        self._broke: EndedStart | None = None  # the last start, until the processes are at work again
        self._attempt = 0
        self._ready = now  # when the next start may be, after a back-off
        self._until = now + JOIN  # when it is made with fewer nodes than all
        self._expected: set[str] = set()
        self._reminded = now
        self._gone: list[Member] = []  # with the leader before
        self._reported_unreadable = False  # of the driver's messages
        if group is not None:
            self._take_over(group, lost, now)

    @property
    def spec(self) -> RunSpec:
        """The job as it runs with the nodes of the last start."""
        return self._spec

    @property
    def nodes(self) -> Mapping[str, Node]:
        """The connected nodes, by name."""
        return self._roster.nodes

    # -- events ----------------------------------------------------------------------------------------

    def joined(self, node: Node, now: float) -> str:
        """Adds a node; returns the reason why it cannot take part, empty if it can."""
        me = self._roster.me
        if node.job != me.job:
            return (
                f"node {node.name} was given another job than node {me.name}; give all nodes the same job file "
                "and the same key=value"
            )
        self._roster.add(node, now)
        if self._roster.is_multi and self.group is None:
            self._effects.say(f"node {node.name} has come: {len(self.nodes)} of {self._most}")
        return ""

    def left(self, name: str, now: float) -> None:
        """Handles the loss of a node."""
        self._roster.remove(name)
        self._signals.pop(name, None)
        self._expected.discard(name)
        start, member = self._start, self.group.member(name) if self.group else None
        if start is not None and member is not None and name not in start.ended:
            start.lost.append(member)
            self._end(start, now, grace=0.0)
            self._decide_if_over(now)

    def message(self, name: str, message: Message, now: float) -> None:
        """Handles a message from a node."""
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
        """Does whatever is due; to be called often."""
        if self.outcome is not None:
            return
        start = self._start
        if start is None:
            self._gather(now)
        elif start.noticed is None:
            self._look(start, now)

    @property
    def generation(self) -> int:
        """The generation of the last start; 0 before the first."""
        return self.group.generation if self.group is not None else 0

    # -- gathering -------------------------------------------------------------------------------------------

    def _take_over(self, group: Group, lost: Sequence[str], now: float) -> None:
        """Continues from the state that the previous leader had sent."""
        self._until = now + max(RETURN, 1.5 * interval(len(group.members)))  # each notices it when it reports
        self._expected = {member.node.name for member in group.members} - {*lost, self._roster.me.name}
        self._restarts.restore(group.policy or self._restarts.state())
        self._longest.update(group.longest or {})
        self._roster.leave_out(group.out)
        self._attempt = group.generation
        gone = [member for member in group.members if member.node.name in lost]
        if gone:
            self._gone = gone  # reported as an event, if this node continues
            if self._missing > 0:
                self._effects.say(lost_message(gone))
            watch = Watch(self._spec, say=self._effects.say, longest={})
            self._broke = EndedStart(failure_of_lost(gone), watch, now)

    @property
    def _missing(self) -> int:
        """Nodes that lack to the minimum; with `lost: shrink` a node without devices counts, as it may be missing."""
        shrinks = self._spec.loaded.job.faults.lost == "shrink"
        return self._least - (len(self.nodes) if shrinks else len(self._roster.able))

    def _gather(self, now: float) -> None:
        """Starts the processes once there are enough nodes."""
        if self._asked:
            self._interrupted(stepped=self.group is not None)
            return
        waited = now >= self._until or (self.generation > 0 and self._expected <= self.nodes.keys())
        missing = self._missing
        enough = self._roster.regular >= self._most or (missing <= 0 and waited)
        if now >= self._ready and enough and self._try_start(now):
            return
        if self._roster.is_multi and missing > 0:
            self._effects.release()
        if self._roster.is_multi and not enough and missing > 0:
            absent = f"; not there yet: {absent}" if (absent := self._roster.absent()) else ""
            self._remind(
                f"waiting for {missing} more node{'s' * (missing > 1)}; {len(self.nodes)} are here{absent}", now
            )

    def _remind(self, words: str, now: float) -> None:
        """Prints the reason why there is no start yet, now and then."""
        if now - self._reminded >= REMIND:
            self._reminded = now
            self._effects.say(words)

    def _try_start(self, now: float) -> bool:
        """Starts the processes; returns whether there is a layout for the nodes, and the folder is free."""
        nodes, spec = self._roster.candidates(self.group)
        if spec is None:
            self._remind("no layout of the job fits the devices of the nodes that are here; waiting for others", now)
            return False
        try:
            mark = self._effects.hold()
            if mark is None:
                self._remind(
                    "the node that led before still has the lock of the run's folder; waiting for its end", now
                )
                return False
            spec.logs.mkdir(parents=True, exist_ok=True)
            spec.forget_failures()
        except UserError as error:
            self._over(error)
            return True
        self._spec = spec
        members = assign_ranks(nodes, spec.layout.world)
        group = Group(
            generation=self.generation + 1,
            members=members,
            others=tuple(node for node in self.nodes.values() if node.name not in {m.node.name for m in members}),
            store=self._effects.store(members[0].node) if len(members) > 1 else None,
            mark=mark,
            job=None if self._roster.is_whole(spec) else spec.loaded.document.data,
            policy=self._restarts.state(),
            longest=dict(self._longest),
            out=self._roster.out,
        )
        self.group = group
        self._start = RunningStart(Watch(spec, say=self._effects.say, longest=self._longest))
        self._roster.started()
        if self._gone:
            self._note_lost(self._gone, step=max(0, self._restarts.furthest))
            self._gone = []
        if self._roster.is_multi:
            ranks = {m.node.name: [m.first, m.first + m.count - 1] for m in members}
            write_event(self._run, "group", generation=group.generation, world=group.world, nodes=ranks)
        message = {"kind": "start", "group": group.plain()}
        for name in sorted(self.nodes, key=lambda name: name == self._roster.me.name):
            self._effects.send(name, message)  # this node comes last: it starts at once, and may fail at once
        return True

    # -- watching --------------------------------------------------------------------------------------------

    def _look(self, start: RunningStart, now: float) -> None:
        assert self.group is not None
        if start.asked_stacks is not None:
            if start.has_stacks(self.group, now):
                self._name_hung(start, now)
            return
        start.look(self.group, now)
        if start.silent:
            start.asked_stacks = now
            self._send_members({"kind": "stacks"})
        elif self._should_grow(start, now):
            if start.paused is None:
                self._effects.say("a node has come; the processes stop after this step, and go on with it")
            start.paused = now
            self._send_members({"kind": "pause"})

    def _name_hung(self, start: RunningStart, now: float) -> None:
        """Reports the process that the others wait for, and ends all of them."""
        assert self.group is not None
        first, values = start.name_hung(self.group, now)
        write_event(self._run, "hung", rank=first.rank, **self._where(first.rank), **values)
        self._end(start, now, grace=0.0)

    def _should_grow(self, start: RunningStart, now: float) -> bool:
        """Returns whether the processes should stop, since a larger layout runs with new nodes."""
        assert self.group is not None
        if len(self.nodes) <= len(self.group.members) or self._asked or "stepped" not in start.watch.moments:
            return False
        if start.paused is not None:
            return now - start.paused >= SETTLED  # asks again: the first message may be lost
        return self._roster.can_grow(self.group, now)

    def _send_members(self, message: Message) -> None:
        assert self.group is not None
        for member in self.group.members:
            self._effects.send(member.node.name, message)

    def _signalled(self, name: str, numbers: list[int]) -> None:
        """Forwards the signals of a node to all. A scheduler sends them to every node, so they count once."""
        self._signals[name] = numbers
        longest = max(self._signals.values(), key=len)
        if len(longest) > len(self._asked):
            if not self._asked:
                self._effects.say(STOPPING)
            self._asked = list(longest)
            for node in list(self.nodes):
                self._effects.send(node, {"kind": "signal", "numbers": self._asked})

    def _tell_restarted(self, start: RunningStart) -> None:
        """Reports the duration of a restart and of its phases, after the first step."""
        if self._broke is None or "stepped" not in start.watch.moments:
            return
        write_event(self._run, "restarted", attempt=self._attempt, **self._broke.restarted(start.watch))
        self._broke = None

    # -- the end of a start ----------------------------------------------------------------------------------

    def _end(self, start: RunningStart, now: float, *, grace: float) -> None:
        """Has the processes of all nodes ended."""
        assert self.group is not None
        if start.noticed is None:
            start.noticed = now
        if grace >= start.grace:  # they have been asked to end
            return
        start.grace = grace
        for member in self.group.members:
            if member.node.name in self.nodes and member.node.name not in start.ended:
                self._effects.send(member.node.name, {"kind": "end", "grace": grace})

    def _decide_if_over(self, now: float) -> None:
        """Decides the next action, once the processes of all nodes have ended."""
        start, group = self._start, self.group
        assert start is not None and group is not None
        if not start.is_over(group):
            return
        self._start = None
        results = [start.ended[m.node.name]["result"] for m in group.members if m.node.name in start.ended]
        if not start.lost and all(result is not None for result in results):
            result = RunResult(**results[0])
            if result.state != "paused":
                self._over(result)
                return
            write_event(self._run, "regrouped", step=result.step)
            self._attempt += 1
            self._ready = self._until = now
            self._expected = set()
        elif self._asked:
            self._interrupted(stepped="stepped" in start.watch.moments)
        else:
            self._follow_up(start, group, now)

    def _interrupted(self, *, stepped: bool) -> None:
        if not stepped:
            self._effects.say(STOPPED_BEFORE)
        # A second signal asks to stop at once, without a checkpoint.
        self._over(Interrupted(self._asked[0], keeps=len(self._asked) == 1))

    def _follow_up(self, start: RunningStart, group: Group, now: float) -> None:
        """Handles a start that failed."""
        first, failures = start.failures()
        done = max(start.watch.done, 0)
        if start.lost:
            self._note_lost(start.lost, step=done)
        if first is None:
            self._over(RunFailed(f"the processes ended without an outcome; their logs are in {self._spec.logs}"))
            return
        error = error_of(
            failures,
            world=group.world,
            where="" if start.lost else f"its log is {self._spec.log_of(first.rank)}",
            beside=self._note_gpu_faults(start, step=done),
        )
        again = self._restarts.after(first, done=start.watch.done, steps=start.watch.steps)
        noticed = start.noticed or now
        self._broke, self._until, self._expected = EndedStart(first, start.watch, noticed), now, set()
        try:
            if not start.lost and (
                self._shrink(group, start.ended, error) or self._replace_nodes(group, start.ended, error)
            ):
                self._attempt += 1
                self._ready = now
                return
        except UserError as refused:
            error, again = refused, None
        if again is None:
            if isinstance(error, RunFailed) or start.watch.done >= 0:  # else the run was refused before it began
                write_event(self._run, "failed", step=done, cause=first.kind, error=f"{first.kind}: {error}")
            self._over(error)
            return
        write_event(
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
        self._effects.say(f"{error}\nstarting again ({again.number} of {self._restarts.most})")
        self._attempt += 1
        self._ready = now + again.wait

    def _note_gpu_faults(self, start: RunningStart, *, step: int) -> list[Problem]:
        """Writes an event for each fault of a GPU; returns the messages for the user."""
        faults = start.gpu_faults()
        for fault in faults:
            write_event(
                self._run,
                "gpu_fault",
                rank=fault.rank,
                **self._where(fault.rank),
                device=fault.address,
                xids=list(fault.codes),
                kind=fault.kind,
                lost=fault.lost,
                step=step,
            )
        if not self._reported_unreadable and any(report["gpu_faults"] is None for report in start.ended.values()):
            self._reported_unreadable = True
            self._effects.say(UNREADABLE)
        return [fault.problem for fault in faults]

    def _note_lost(self, gone: Sequence[Member], *, step: int) -> None:
        for member in gone:
            ranks = [member.first, member.first + member.count - 1]
            write_event(self._run, "node_lost", node=member.node.name, ranks=ranks, step=step)
        if (missing := self._missing) > 0:
            self._effects.say(f"{lost_message(gone)}; waiting for {missing} more node{'s' * (missing > 1)}")

    def _shrink(self, group: Group, ended: Mapping[str, Message], error: UserError) -> bool:
        """Continues without lost devices, if the job allows it and others are left."""
        lost = [int(rank) for report in ended.values() for rank in report["out"]]
        if not lost and self._restarts.lost is not None and not isinstance(error, CannotRun):
            lost = [self._restarts.lost]
        if not lost or self._spec.loaded.job.faults.lost != "shrink":
            return False
        layout, spec = self._spec.layout, self._roster.without(lost, group)
        if spec is None:
            return False
        self._restarts.reset()
        now = spec.layout
        write_event(self._run, "shrunk", without=lost, was=layout.describe(), now=now.describe(), why=str(error))
        self._effects.say(f"{error}\ngoing on without: {layout.describe()} is now {now.describe()}")
        return True

    def _replace_nodes(self, group: Group, ended: Mapping[str, Message], error: UserError) -> bool:
        """Continues without nodes that do not pass their test, if spares or enough others are left."""
        ranks = {int(rank) for report in ended.values() for rank in report["out"]}
        bad = [member.node for member in group.members if not ranks.isdisjoint(member.ranks)]
        if not bad or not self._roster.is_multi or len(bad) == len(group.members) > 1:
            return False  # a wrong sum of all says nothing about one of them
        layout, spec = self._spec.layout, self._roster.without_nodes(bad, group, least=self._least)
        if spec is None:
            return False
        self._restarts.reset()
        names, now = [node.name for node in bad], spec.layout
        write_event(self._run, "left_out", nodes=names, was=layout.describe(), now=now.describe(), why=str(error))
        words = f"node{'s' * (len(names) > 1)} {', '.join(names)} for the rest of the run"
        self._effects.say(f"{error}\ngoing on without {words}: {layout.describe()} is now {now.describe()}")
        return True

    def _where(self, rank: int) -> dict[str, Any]:
        """Returns the node of a rank, for events of several nodes."""
        return {"node": self.group.node_of(rank).node.name} if self._roster.is_multi and self.group else {}

    def _over(self, outcome: Outcome) -> None:
        if isinstance(outcome, Interrupted):
            write_event(self._run, "interrupted", error=str(outcome))
        self.outcome = outcome
