"""The supervisor of one node: finds the others, leads or follows, and keeps its own processes.

One thread does all of this, but for copies of the training state, which go to the next node in a thread of their own.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from stoker.errors import Problem, UserError
from stoker.files import no_link
from stoker.job.load_job import check_document
from stoker.launch.first_failure import Interrupted, failure_of
from stoker.launch.monitor import record
from stoker.launch.nodes.addresses import shown
from stoker.launch.nodes.agent import Agent, interval
from stoker.launch.nodes.cache_exchange import CacheServer
from stoker.launch.nodes.channel import Address, Down, Message, Peer, PeerNetwork, Said, Up, text_of
from stoker.launch.nodes.find_leader import Follow, GroupReply, Lead, Search
from stoker.launch.nodes.group import Group, Node
from stoker.launch.nodes.leader import Hands, Leader
from stoker.launch.nodes.neighbour_copies import Keeper, Sender
from stoker.launch.nodes.outcome import Outcome, outcome_of, plain
from stoker.launch.run_spec import RunResult, RunSpec
from stoker.launch.worker_main import Entry
from stoker.node_cache.cache_stats import HERE
from stoker.node_cache.job_urls import urls_of
from stoker.runs.run_folder import RunFolder
from stoker.runs.shm_folder import CUT, SUPERVISOR, SharedFolder, on_node, shared_memory

POLL = 0.05  # seconds between two looks
TEND = 1.0  # seconds between two looks at how long others have been silent
LOST = 10.0  # seconds of silence after which a node counts as lost; four signs of life where those are rarer
SIGNS = (1.0, 5.0)  # seconds between two signs of life: of a few nodes, and of a thousand
PROBE = 2.0  # seconds between two questions of a leader to nodes that are not with it
SEEN = 10.0  # seconds in which another node's file in the run's folder is seen on this one
FAREWELL = 5.0  # seconds that the outcome gets to reach all nodes
HELD = 60.0  # seconds in which a leader that was lost lets the run's folder go
REFUSALS = 3  # connections in a row that end where the secret is proved: it is another one


@dataclass(frozen=True)
class Place:
    """This node among those of a run.

    Attributes:
        node: what the others learn of it.
        rendezvous: addresses at which nodes are looked for.
        least, most: nodes to train with.
        secret: that all of them share.
    """

    node: Node
    rendezvous: tuple[Address, ...]
    least: int
    most: int
    secret: bytes


class NodeSupervisor:
    """Keeps one node's part of a run, until the run is over.

    Args:
        spec: the whole job, as it would run with all nodes.
        entry: what each process calls instead of training.
        asked: signals that this process got, as they come.
        take: takes the run's folder; yields whether it is new.
        say: prints a line for the user.
        nccl: whether the processes talk through NCCL.
        cache: gives other nodes objects of this one's cache; by default one is made.
    """

    def __init__(
        self,
        spec: RunSpec,
        place: Place,
        network: PeerNetwork,
        *,
        entry: Entry | None,
        asked: Sequence[int],
        take: Callable[[], AbstractContextManager[bool]],
        say: Callable[[str], None],
        nccl: bool,
        cache: CacheServer | None = None,
    ) -> None:
        on_node(place.node.name)
        self._spec, self._place, self._network = spec, place, network
        self._asked, self._take, self._say, self._nccl = asked, take, say, nccl
        self._name = place.node.name
        self._agent = Agent(
            entry,
            name=self._name,
            address=network.address[0],
            secret=place.secret,
            tell=self._tell,
            nccl=nccl,
        )
        self._leader: Leader | None = None
        self._search: Search | None = None
        self._upward: Peer | None = None  # to the leader that this node follows
        self._members: dict[str, Peer] = {}  # of the nodes that follow this one
        self._heard: dict[Peer, float] = {}
        self._said: dict[Peer, float] = {}
        self._asking: dict[Peer, Address] = {}
        self._group: Group | None = None
        self._pending: tuple[Group, float] | None = None  # a start whose folder is not seen yet
        self._store: socket.socket | None = None
        self._shared: SharedFolder | None = None
        self._shared_stack, self._hold_stack = ExitStack(), ExitStack()
        self._holds = ""
        self._hold_until: float | None = None
        self._probed = 0.0
        self._refusals = 0
        self._told_signals = 0
        self._outcome: Outcome | None = None
        self._lost: tuple[Address, ...] = ()
        self._sender: Sender | None = None
        self._keeper = Keeper(self._copies_folder)
        self._cache = cache or CacheServer(urls_of(spec.loaded.job))
        self._cut_asked = self._tended = 0.0
        self._last: tuple[Message, bytes] = {}, b""

    def run(self) -> RunResult:
        """Takes part until the run is over.

        Raises:
            UserError: the run failed, or this node cannot take part.
            Interrupted: a signal ended the run.
        """
        self._say(f"node {self._name} listens on {shown(self._network.address)}")
        self._seek(time.monotonic())
        with self._hold_stack, self._shared_stack:
            try:
                while self._outcome is None:
                    self._turn()
                self._bid_farewell(self._outcome)
            finally:
                self._agent.abandon()
                self._stop_copies()
                self._keeper.close()
                self._cache.close()
                self._record_served()
            if isinstance(self._outcome, RunResult):
                return self._outcome
            raise self._outcome

    def _turn(self, wait: float = POLL) -> None:
        """One round of all that there is to do."""
        for happening in self._network.poll(wait):
            now = time.monotonic()
            match happening:
                case Up(peer):
                    self._came_up(peer, now)
                case Down(peer, refused):
                    self._went_down(peer, now, refused=refused)
                case Said(peer, message):
                    self._heard[peer] = now
                    try:
                        self._hear(peer, message, now)
                    except (KeyError, TypeError, ValueError):  # of another version of the program
                        self._network.close_peer(peer)
        now = time.monotonic()
        self._pass_signals(now)
        self._start_pending(now)
        self._agent.look(now)
        self._look_for_cut(now)
        if self._search is not None:
            self._search_on(self._search, now)
        if self._leader is not None:
            self._leader.tick(now)
            self._probe(self._leader, now)
            self._outcome = self._outcome or self._leader.outcome
        if now - self._tended >= TEND:
            self._tended = now
            self._drop_silent(now)
            self._give_sign(now)

    # -- connections -----------------------------------------------------------------------------------------

    def _came_up(self, peer: Peer, now: float) -> None:
        self._heard[peer] = now
        self._refusals = 0
        if peer in self._asking:
            peer.send({"kind": "who"})
        elif peer is self._upward:
            peer.send({"kind": "join", "node": self._place.node.plain()})

    def _went_down(self, peer: Peer, now: float, *, refused: bool) -> None:
        self._heard.pop(peer, None)
        self._said.pop(peer, None)
        if refused:
            self._refused(peer)
        if (address := self._asking.pop(peer, None)) is not None:
            if self._search is not None:
                self._search.failed(address)
        elif peer is self._upward:
            self._lose_leader(peer, now)
        elif self._members.get(peer.name) is peer:
            del self._members[peer.name]
            if self._leader is not None:
                self._leader.left(peer.name, now)

    def _refused(self, peer: Peer) -> None:
        """The other side closed the connection where the secret is proved."""
        self._refusals += 1
        if self._refusals >= REFUSALS and self._group is None and not self._members:
            self._outcome = UserError(
                Problem(
                    f"the supervisor at {shown(peer.address)} has another secret than node {self._name}",
                    "give all nodes the same --secret",
                )
            )

    def _hear(self, peer: Peer, message: Message, now: float) -> None:
        match message.get("kind"):
            case "who":
                peer.send({"kind": "answer", **self._answer().plain()})
            case "answer":
                self._learn(peer, GroupReply.of(message), now)
            case "join":
                self._take_in(peer, Node.of(message["node"]), now)
            case "copies":
                connection, seal, rest = self._network.detach(peer)
                self._keeper.receive(connection, seal, rest, message)
            case "cache":
                connection, seal, rest = self._network.detach(peer)
                self._cache.receive(connection, seal, rest, message)
            case "bye":
                self._network.close_peer(peer)
            case _ if peer is self._upward:
                self._obey(peer, message, now)
            case _ if self._leader is not None and self._members.get(peer.name) is peer:
                self._leader.message(peer.name, message, now)

    def _answer(self) -> GroupReply:
        """What this node says of its group."""
        if self._leader is not None:
            return GroupReply(self._network.address, self._leader.generation, len(self._leader.nodes))
        if self._upward is not None and self._upward.is_up and self._upward.name:
            members = len(self._group.members) if self._group else 0
            return GroupReply(self._upward.address, self._generation, members)
        return GroupReply(None, self._generation, 1)

    @property
    def _generation(self) -> int:
        return self._group.generation if self._group is not None else 0

    def _learn(self, peer: Peer, answer: GroupReply, now: float) -> None:
        """What another node says of its group."""
        address = self._asking.pop(peer, None)
        self._network.close_peer(peer)
        if address is None:
            return
        if self._search is not None:
            self._search.answered(address, answer)
        elif self._leader is not None and answer.leader not in (None, self._network.address):
            assert answer.leader is not None
            if self._is_weaker(self._leader, answer):
                self._yield(answer.leader, now)

    def _take_in(self, peer: Peer, node: Node, now: float) -> None:
        """A node asks to follow this one."""
        if self._leader is None:
            peer.send({"kind": "elsewhere"})
            return
        before = self._members.get(node.name)
        if node.name == self._name or (
            before is not None
            and before.address[0] != peer.address[0]
            and now - self._heard.get(before, 0.0) < LOST / 2
        ):
            words = f"another node is named {node.name}; give each node its own --name"
            peer.send({"kind": "refused", "why": words})
            return
        if before is not None:  # it was started again before its end was noticed
            self._network.close_peer(before)
            self._members.pop(node.name)
            self._leader.left(node.name, now)
        if words := self._leader.joined(node, now):
            peer.send({"kind": "refused", "why": words})
            return
        peer.name = node.name
        self._members[node.name] = peer
        peer.send({"kind": "joined", "group": self._leader.group.plain() if self._leader.group else None})

    # -- who leads -------------------------------------------------------------------------------------------

    def _known(self) -> list[Address]:
        """All addresses at which nodes may be, in their order."""
        group = self._group
        members = [member.node.address for member in group.members] if group else []
        others = [node.address for node in group.others] if group else []
        return list(dict.fromkeys([*members, *self._place.rendezvous, *others]))

    def _seek(self, now: float, *, lost: Sequence[Address] = ()) -> None:
        """Begins to look for a leader."""
        order = self._known()
        if lost:  # what was lost comes last: it may be back
            order = [*(a for a in order if a not in lost), *(a for a in order if a in lost)]
        self._search = Search(order, self._network.address, now=now, lost=lost, generation=self._generation)

    def _search_on(self, search: Search, now: float) -> None:
        pending = set(self._asking.values())
        for address in search.to_ask(now):
            if address not in pending:
                self._asking[self._network.dial(address)] = address
        match search.decide(now):
            case Follow(leader):
                self._search = None
                self._upward = self._network.dial(leader)
            case Lead():
                self._lead(now)

    def _lead(self, now: float) -> None:
        self._search, self._told_signals = None, 0
        gone = [m.node.name for m in self._group.members if m.node.address in self._lost] if self._group else []
        hands = Hands(self._send, self._say, self._hold, self._let_go, self._open_store)
        self._leader = Leader(
            self._spec,
            hands,
            me=self._place.node,
            least=self._place.least,
            most=self._place.most,
            nccl=self._nccl,
            now=now,
            group=self._group,
            lost=gone,
        )

    def _lose_leader(self, peer: Peer, now: float) -> None:
        """The leader has gone, or was never there: another one is looked for."""
        was_there = bool(peer.name)
        self._upward = None
        if was_there:
            self._say(f"node {self._name}: the leading node has gone")
        self._agent.abandon()
        self._pending = None
        self._stop_copies()
        self._lost = (*self._lost, peer.address)
        self._seek(now, lost=self._lost)
        assert self._search is not None
        self._search.failed(peer.address)

    def _is_weaker(self, leader: Leader, other: GroupReply) -> bool:
        """Whether another leader's group is the one that goes on."""
        mine = (leader.generation, len(leader.nodes), self._network.address)
        assert other.leader is not None
        return mine < (other.generation, other.members, other.leader)

    def _yield(self, leader: Address, now: float) -> None:
        """Gives way to another leader, which has the newer group."""
        self._say(f"node {self._name}: follows the group at {shown(leader)}, which has gone on")
        for peer in list(self._members.values()):
            peer.send({"kind": "elsewhere"})
            self._network.close_peer(peer)
        self._members.clear()
        self._agent.abandon()
        self._pending = None
        self._stop_copies()
        self._leader = None
        self._let_go()
        self._upward = self._network.dial(leader)

    def _probe(self, leader: Leader, now: float) -> None:
        """Asks nodes that are not with this leader whether they have another one, after a cut link or a late start."""
        if now - self._probed < PROBE or self._network.is_cut:
            return
        self._probed = now
        here = {node.address for node in leader.nodes.values()} | set(self._asking.values())
        for address in self._known():
            if address not in here and address != self._network.address:
                self._asking[self._network.dial(address)] = address

    def _drop_silent(self, now: float) -> None:
        """Ends connections to nodes that give no sign of life."""
        limit = max(LOST, 4 * self._sign_every)
        watched = [*self._members.values(), *([self._upward] if self._upward and self._upward.is_up else [])]
        for peer in watched:
            if now - self._heard.get(peer, now) > limit:
                self._network.close_peer(peer)
        for peer in list(self._asking):
            if now - peer.began > LOST / 2:
                self._network.close_peer(peer)

    @property
    def _sign_every(self) -> float:
        """Seconds between two signs of life."""
        return min(SIGNS[1], max(SIGNS[0], interval(len(self._group.members) if self._group else 1)))

    def _give_sign(self, now: float) -> None:
        """Says that this node lives, where nothing else was to be said."""
        every = self._sign_every
        for peer in [*self._members.values(), *([self._upward] if self._upward else [])]:
            if now - self._said.get(peer, 0.0) >= every:
                self._said[peer] = now
                peer.send({"kind": "alive"})

    # -- as the leader's hands -------------------------------------------------------------------------------

    def _send(self, name: str, message: Message) -> None:
        if name == self._name:
            self._do(message, time.monotonic())
        elif name in self._members:
            if message is not self._last[0]:
                self._last = message, text_of(message)
            self._members[name].send_text(self._last[1])

    def _hold(self) -> str | None:
        """Takes the run's folder, and leaves a file there that the other nodes look for."""
        if self._holds:
            return self._holds
        try:
            self._hold_stack.enter_context(self._take())
        except UserError:
            if self._group is None:
                raise
            now = time.monotonic()  # the lost leader may hold it for a moment
            self._hold_until = self._hold_until or now + HELD
            if now > self._hold_until:
                raise
            return None
        self._hold_until = None
        for old in self._spec.output.glob(".group-*"):
            old.unlink(missing_ok=True)
        mark = f".group-{os.urandom(8).hex()}"
        with open(self._spec.output / mark, "xb", opener=no_link):
            pass
        self._holds = mark
        return mark

    def _let_go(self) -> None:
        if self._holds:
            (self._spec.output / self._holds).unlink(missing_ok=True)
            self._holds = ""
        self._hold_stack.close()

    def _open_store(self) -> Address:
        host = self._network.address[0]
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._store = socket.create_server((host, 0), family=family, backlog=1024)
        return host, self._store.getsockname()[1]

    # -- as one of the nodes ---------------------------------------------------------------------------------

    def _tell(self, message: Message) -> None:
        """Tells the leader, wherever it is."""
        if self._leader is not None:
            self._leader.message(self._name, message, time.monotonic())
        elif self._upward is not None:
            self._said[self._upward] = time.monotonic()
            self._upward.send(message)

    def _obey(self, peer: Peer, message: Message, now: float) -> None:
        """Does what the leader says."""
        match message["kind"]:
            case "joined":
                peer.name = "leader"
                self._lost = ()
                self._told_signals = 0
                group = message["group"]
                self._group = Group.of(group) if group else self._group
                self._say(f"node {self._name} follows {shown(peer.address)}")
            case "elsewhere":
                self._network.close_peer(peer)
            case "refused":
                self._outcome = UserError(Problem(str(message["why"])))
            case "over":
                self._outcome = outcome_of(message)
            case _:
                self._do(message, now)

    def _do(self, message: Message, now: float) -> None:
        match message["kind"]:
            case "start":
                self._stop_copies()
                self._group = Group.of(message["group"])
                self._agent.abandon()
                self._keeper.drop()
                if self._group.member(self._name) is not None:
                    self._pending = self._group, now
                    self._start_pending(now)
            case "end":
                if self._pending is not None:
                    self._give_up_start()
                self._agent.end(float(message["grace"]))
            case "pause":
                self._agent.pause()
            case "stacks":
                self._agent.stacks()
            case "signal":
                self._agent.hand_on([int(number) for number in message["numbers"]])

    def _give_up_start(self) -> None:
        self._pending = None
        self._tell({"kind": "ended", "result": None, "failures": [], "out": []})

    def _start_pending(self, now: float) -> None:
        """Starts the processes, once the run's folder is seen here."""
        if self._pending is None:
            return
        group, since = self._pending
        try:
            if not self._sees(group, now - since):
                return
            self._pending = None
            spec = self._spec_of(group)
            self._shared = self._shared or self._shared_stack.enter_context(shared_memory(self._spec.output))
        except UserError as error:
            self._pending = None
            member = group.member(self._name)
            failure = asdict(failure_of(error, member.first if member else 0))
            self._tell({"kind": "ended", "result": None, "failures": [failure], "out": []})
            return
        spec.logs.mkdir(parents=True, exist_ok=True)
        (self._shared.path / SUPERVISOR).write_text(str(os.getpid()))
        member = group.member(self._name)
        assert member is not None
        last = member.first + member.count - 1
        self._say(f"node {self._name}: rank {member.first} to {last} of {group.world}")
        store, self._store = self._store, None
        self._agent.start(spec, group, self._shared, store if member.first == 0 else None)
        self._begin_copies(group)

    def _sees(self, group: Group, waited: float) -> bool:
        """Whether the run's folder is that of the leader.

        Raises:
            UserError: it is another one.
        """
        output, to = self._spec.output, self._spec.loaded.job.checkpoint.to
        if (output / group.mark).exists():
            return True
        if to is not None and "://" in to:
            output.mkdir(parents=True, exist_ok=True)
            return True
        if waited < SEEN:
            return False
        words = f"the run's folder {output} of node {group.members[0].node.name} is not seen on node {self._name}"
        hint = "give an `output` on storage that all nodes share, or a URL in `checkpoint.to`"
        raise UserError(self._spec.loaded.problem("output", words, hint))

    def _spec_of(self, group: Group) -> RunSpec:
        """The job as the group runs it."""
        if group.job is None:
            return self._spec
        document = replace(self._spec.loaded.document, data=group.job)
        return replace(self._spec, loaded=check_document(document))

    def _pass_signals(self, now: float) -> None:
        """Tells the leader of signals that this node got."""
        if len(self._asked) == self._told_signals:
            return
        if self._leader is not None or (self._upward is not None and self._upward.name):
            self._told_signals = len(self._asked)
            self._tell({"kind": "signals", "numbers": list(self._asked)})
        elif self._asked:
            self._outcome = Interrupted(self._asked[0])

    def _bid_farewell(self, outcome: Outcome) -> None:
        """Tells the others how the run ended."""
        if self._leader is not None:
            message = {"kind": "over", **plain(outcome)}
            for peer in self._members.values():
                peer.send(message)
        elif isinstance(outcome, UserError) and self._upward is not None:
            self._upward.send({"kind": "ended", "result": None, "out": [], "failures": []})
        until = time.monotonic() + FAREWELL
        while self._members and time.monotonic() < until:
            for happening in self._network.poll(POLL):
                if isinstance(happening, Down):
                    self._members = {name: peer for name, peer in self._members.items() if peer is not happening.peer}
        self._let_go()

    # -- copies of the state ---------------------------------------------------------------------------------

    def _copies_folder(self) -> tuple[Path, int] | None:
        """Where copies of other nodes' ranks go, and in which generation."""
        if self._shared is None or self._group is None:
            return None
        return self._shared.path, self._group.generation

    def _begin_copies(self, group: Group) -> None:
        """Has the copies of this node's ranks sent to the next node."""
        neighbour, member = group.after(self._name), group.member(self._name)
        if neighbour is None or member is None or self._shared is None:
            return
        self._sender = Sender(
            self._shared.path,
            member.ranks,
            neighbour.node,
            generation=group.generation,
            source=self._network.address[0],
            secret=self._place.secret,
            output=self._spec.output,
            name=self._name,
        )

    def _stop_copies(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def _record_served(self) -> None:
        """Writes down what this node gave to other nodes, and what it fetched for them since its processes began."""
        if self._cache.served:
            fetched = HERE.counts - self._spec.cached
            values = {"bytes": self._cache.served, "origin_bytes": fetched.origin_bytes}
            record(RunFolder(self._spec.output), "cache_served", node=self._name, **values)

    def _look_for_cut(self, now: float) -> None:
        """Cuts this node off, where a rehearsal asks for it."""
        if self._shared is None or now - self._cut_asked < POLL:
            return
        self._cut_asked = now
        asked = self._shared.path / CUT
        if asked.exists():
            seconds = float(asked.read_text())
            asked.unlink()
            self._say(f"node {self._name} is cut off for {seconds:g} s, as was asked for")
            self._network.cut(seconds)
            self._stop_copies()
            self._keeper.drop()
            self._cache.close()
