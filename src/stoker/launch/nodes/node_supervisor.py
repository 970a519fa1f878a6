"""The supervisor of one node: finds the others, leads or follows, and runs its own processes.

One thread does all of this, except for copies of the training state, which a second thread sends to the next node.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from stoker.errors import Interrupted, Problem, UserError
from stoker.launch.monitor import write_event
from stoker.launch.nodes.addresses import host_and_port
from stoker.launch.nodes.agent import Agent
from stoker.launch.nodes.cache_exchange import CacheServer
from stoker.launch.nodes.channel import Address, Down, Message, Peer, PeerNetwork, Said, Up, text_of
from stoker.launch.nodes.find_leader import Follow, GroupReply, Lead
from stoker.launch.nodes.folder_hold import FolderHold
from stoker.launch.nodes.group import Group, Node
from stoker.launch.nodes.group_questions import GroupQuestions
from stoker.launch.nodes.leader import Leader
from stoker.launch.nodes.leader_effects import LeaderEffects
from stoker.launch.nodes.node_part import NodePart
from stoker.launch.nodes.outcome import Outcome, outcome_of, outcome_to_json
from stoker.launch.nodes.place import Place
from stoker.launch.nodes.signs_of_life import SignsOfLife
from stoker.launch.run_spec import RunSpec
from stoker.node_cache.cache_stats import HERE
from stoker.runs.run_folder import RunFolder
from stoker.runs.shm_folder import set_node_name
from stoker.train.run_result import RunResult

POLL = 0.05  # seconds between two polls
MANY = 100  # nodes whose messages would otherwise each wake their leader
LONGEST_REST = 0.2  # seconds between two turns of a leader of a thousand nodes
TEND = 1.0  # seconds between two checks for silent nodes
FAREWELL = 5.0  # timeout in seconds to send the outcome to all nodes
REFUSALS = 3  # successive connections closed during authentication, after which the secrets are taken to differ


class NodeSupervisor:
    """Runs one node's part of a run, until the run is over.

    Args:
        spec: the whole job, as it would run with all nodes.
        asked: signals that this process received, in order; later ones are appended.
        take: locks the run's folder; yields whether it is new.
        say: prints a line for the user.
        nccl: whether the processes communicate through NCCL.
        cache: serves objects of this node's cache to other nodes.
    """

    def __init__(
        self,
        spec: RunSpec,
        place: Place,
        network: PeerNetwork,
        *,
        asked: Sequence[int],
        take: Callable[[], AbstractContextManager[bool]],
        say: Callable[[str], None],
        nccl: bool,
        cache: CacheServer,
    ) -> None:
        set_node_name(place.node.name)
        self._spec, self._place, self._network = spec, place, network
        self._asked, self._say, self._nccl = asked, say, nccl
        self._name = place.node.name
        address = network.address[0]
        agent = Agent(name=self._name, address=address, secret=place.secret, tell=self._tell, nccl=nccl)
        self._folder = FolderHold(spec, take)
        self._part = NodePart(spec, place, self._folder, agent, address=address, tell=self._tell, say=say)
        self._leader: Leader | None = None
        self._questions = GroupQuestions(network)
        self._signs = SignsOfLife()
        self._upward: Peer | None = None  # to the leader that this node follows
        self._members: dict[str, Peer] = {}  # of the nodes that follow this one
        self._refusals = 0
        self._told_signals = 0
        self._outcome: Outcome | None = None
        self._cache = cache
        self._cut_asked = self._tended = 0.0
        self._last: tuple[Message, bytes] = {}, b""

    def run(self) -> RunResult:
        """Takes part until the run is over.

        Raises:
            UserError: the run failed, or this node cannot take part.
            Interrupted: a signal ended the run.
        """
        self._say(f"node {self._name} listens on {host_and_port(self._network.address)}")
        self._seek(time.monotonic())
        with self._folder, self._part:
            try:
                while self._outcome is None:
                    self._turn()
                    time.sleep(poll_interval(len(self._members)))
                self._bid_farewell(self._outcome)
            finally:
                self._cache.close()
                self._record_served()
            if isinstance(self._outcome, RunResult):
                return self._outcome
            raise self._outcome

    def _turn(self, wait: float = POLL) -> None:
        """Runs one iteration of the supervisor's loop."""
        for happening in self._network.poll(wait):
            now = time.monotonic()
            match happening:
                case Up(peer):
                    self._came_up(peer, now)
                case Down(peer, refused):
                    self._went_down(peer, now, refused=refused)
                case Said(peer, message):
                    self._signs.received(peer, now)
                    try:
                        self._hear(peer, message, now)
                    except (KeyError, TypeError, ValueError):  # a message of another version of the program
                        self._network.close_peer(peer)
        now = time.monotonic()
        self._pass_signals(now)
        self._part.turn(now)
        self._look_for_cut(now)
        match self._questions.look(now):
            case Follow(leader):
                self._upward = self._network.dial(leader)
            case Lead():
                self._lead(now)
        if self._leader is not None:
            self._leader.tick(now)
            if self._questions.is_probe_due(now):  # gathering a thousand addresses in every turn takes too long
                self._questions.probe(self._known(), (node.address for node in self._leader.nodes.values()), now)
            self._outcome = self._outcome or self._leader.outcome
        if now - self._tended >= TEND:
            self._tended = now
            self._tend(now)

    def _tend(self, now: float) -> None:
        """Closes connections to silent nodes, and sends heartbeats."""
        nodes = len(self._part.group.members) if self._part.group else 1
        upward = [self._upward] if self._upward is not None else []
        watched = [*self._members.values(), *(peer for peer in upward if peer.is_up)]
        for peer in self._signs.silent(watched, nodes, now):
            self._network.close_peer(peer)
        self._questions.drop_slow(now)
        self._signs.give([*self._members.values(), *upward], nodes, now)

    # -- connections -----------------------------------------------------------------------------------------

    def _came_up(self, peer: Peer, now: float) -> None:
        self._signs.received(peer, now)
        self._refusals = 0
        if not self._questions.came_up(peer) and peer is self._upward:
            peer.send({"kind": "join", "node": self._place.node.plain()})

    def _went_down(self, peer: Peer, now: float, *, refused: bool) -> None:
        self._signs.forget(peer)
        if refused:
            self._refused(peer)
        if self._questions.went_down(peer):
            return
        if peer is self._upward:
            self._lose_leader(peer, now)
        elif self._members.get(peer.name) is peer:
            del self._members[peer.name]
            if self._leader is not None:
                self._leader.left(peer.name, now)

    def _refused(self, peer: Peer) -> None:
        """Handles a connection that the other side closed during authentication."""
        self._refusals += 1
        if self._refusals >= REFUSALS and self._part.group is None and not self._members:
            self._outcome = UserError(
                Problem(
                    f"the supervisor at {host_and_port(peer.address)} has another secret than node {self._name}",
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
                self._part.keeper.receive(connection, seal, rest, message)
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
        """Returns this node's answer about its group."""
        if self._leader is not None:
            return GroupReply(self._network.address, self._leader.generation, len(self._leader.nodes))
        if self._upward is not None and self._upward.is_up and self._upward.name:
            members = len(self._part.group.members) if self._part.group else 0
            return GroupReply(self._upward.address, self._part.generation, members)
        return GroupReply(None, self._part.generation, 1)

    def _learn(self, peer: Peer, answer: GroupReply, now: float) -> None:
        """Processes another node's answer about its group."""
        found = self._questions.answered(peer, answer)
        if found and self._leader is not None and answer.leader not in (None, self._network.address):
            assert answer.leader is not None
            if self._is_weaker(self._leader, answer):
                self._yield(answer.leader, now)

    def _take_in(self, peer: Peer, node: Node, now: float) -> None:
        """Handles a node's request to follow this one."""
        if self._leader is None:
            peer.send({"kind": "elsewhere"})
            return
        before = self._members.get(node.name)
        if node.name == self._name or (
            before is not None
            and before.address[0] != peer.address[0]
            and self._signs.is_fresh(before, 1 + len(self._members), now)
        ):
            words = f"another node is named {node.name}; give each node its own --name"
            peer.send({"kind": "refused", "why": words})
            return
        if before is not None:  # it was restarted before its loss was noticed
            self._network.close_peer(before)
            self._members.pop(node.name)
            self._leader.left(node.name, now)
        if words := self._leader.joined(node, now):
            peer.send({"kind": "refused", "why": words})
            return
        peer.name = node.name
        self._members[node.name] = peer
        peer.send({"kind": "joined", "group": self._leader.group.plain() if self._leader.group else None})

    # -- choice of the leader --------------------------------------------------------------------------------

    def _known(self) -> list[Address]:
        """Returns all addresses at which nodes may be, in order of precedence."""
        group = self._part.group
        members = [member.node.address for member in group.members] if group else []
        others = [node.address for node in group.others] if group else []
        return list(dict.fromkeys([*members, *self._place.rendezvous, *others]))

    def _seek(self, now: float, *, lost: Address | None = None) -> None:
        """Begins to look for a leader."""
        self._questions.seek(self._known(), self._part.generation, now, lost=lost)

    def _lead(self, now: float) -> None:
        self._told_signals = 0
        group, lost = self._part.group, self._questions.lost
        gone = [member.node.name for member in group.members if member.node.address in lost] if group else []
        effects = LeaderEffects(self._send, self._say, self._hold, self._folder.let_go, self._part.open_store)
        self._leader = Leader(
            self._spec,
            effects,
            me=self._place.node,
            least=self._place.least,
            most=self._place.most,
            nccl=self._nccl,
            now=now,
            rendezvous=self._place.rendezvous,
            group=group,
            lost=gone,
        )

    def _lose_leader(self, peer: Peer, now: float) -> None:
        """Searches for another leader, after the leader was lost or never reached."""
        was_there = bool(peer.name)
        self._upward = None
        if was_there:
            self._say(f"node {self._name}: the leading node has gone")
        self._part.abandon()
        self._seek(now, lost=peer.address)

    def _is_weaker(self, leader: Leader, other: GroupReply) -> bool:
        """Returns whether another leader's group takes precedence over this one's."""
        mine = (leader.generation, len(leader.nodes), self._network.address)
        assert other.leader is not None
        return mine < (other.generation, other.members, other.leader)

    def _yield(self, leader: Address, now: float) -> None:
        """Gives way to another leader, whose group takes precedence."""
        self._say(f"node {self._name}: follows the group at {host_and_port(leader)}, which has gone on")
        for peer in list(self._members.values()):
            peer.send({"kind": "elsewhere"})
            self._network.close_peer(peer)
        self._members.clear()
        self._part.abandon()
        self._leader = None
        self._folder.let_go()
        self._upward = self._network.dial(leader)

    # -- actions of the leader -------------------------------------------------------------------------------

    def _send(self, name: str, message: Message) -> None:
        if name == self._name:
            self._part.do(message, time.monotonic())
        elif name in self._members:
            if message is not self._last[0]:
                self._last = message, text_of(message)
            self._members[name].send_text(self._last[1])

    def _hold(self) -> str | None:
        return self._folder.hold(lately_led=self._part.group is not None)

    # -- a node of the group ---------------------------------------------------------------------------------

    def _tell(self, message: Message) -> None:
        """Sends a message to the leader, which may be this node."""
        if self._leader is not None:
            self._leader.message(self._name, message, time.monotonic())
        elif self._upward is not None:
            self._signs.sent(self._upward, time.monotonic())
            self._upward.send(message)

    def _obey(self, peer: Peer, message: Message, now: float) -> None:
        """Executes a command of the leader."""
        match message["kind"]:
            case "joined":
                peer.name = "leader"
                self._questions.lost = ()
                self._told_signals = 0
                group = message["group"]
                self._part.group = Group.of(group) if group else self._part.group
                self._say(f"node {self._name} follows {host_and_port(peer.address)}")
            case "elsewhere":
                self._network.close_peer(peer)
            case "refused":
                self._outcome = UserError(Problem(str(message["why"])))
            case "over":
                self._outcome = outcome_of(message)
            case _:
                self._part.do(message, now)

    def _pass_signals(self, now: float) -> None:
        """Forwards signals of this node to the leader."""
        if len(self._asked) == self._told_signals:
            return
        if self._leader is not None or (self._upward is not None and self._upward.name):
            self._told_signals = len(self._asked)
            self._tell({"kind": "signals", "numbers": list(self._asked)})
        elif self._asked:
            self._outcome = Interrupted(self._asked[0])

    def _bid_farewell(self, outcome: Outcome) -> None:
        """Sends the run's outcome to the nodes that follow this one."""
        message = text_of({"kind": "over", **outcome_to_json(outcome)})
        for peer in self._members.values():
            peer.send_text(message)
        until = time.monotonic() + FAREWELL
        while self._members and time.monotonic() < until:
            for happening in self._network.poll(POLL):
                if isinstance(happening, Down):
                    self._members = {name: peer for name, peer in self._members.items() if peer is not happening.peer}

    def _record_served(self) -> None:
        """Records the bytes that this node served to others, and those that it fetched since its processes began."""
        if self._cache.served:
            fetched = HERE.counts - self._spec.cached
            values = {"bytes": self._cache.served, "origin_bytes": fetched.origin_bytes}
            write_event(RunFolder(self._spec.output), "cache_served", node=self._name, **values)

    def _look_for_cut(self, now: float) -> None:
        """Cuts this node off if a rehearsal requests it."""
        if now - self._cut_asked < POLL:
            return
        self._cut_asked = now
        if (seconds := self._part.asked_cut()) is not None:
            self._say(f"node {self._name} is cut off for {seconds:g} s, as was asked for")
            self._network.cut(seconds)
            self._part.stop_copies()
            self._part.keeper.close()
            self._cache.close()


def poll_interval(members: int) -> float:
    """Returns the seconds that a supervisor rests between two turns: a hundred messages a second are taken together,
    instead of a turn for each, and a thousand nodes notice nothing of a fifth of a second.

    Args:
        members: nodes that follow this one.
    """
    return min(LONGEST_REST, max(POLL, members * LONGEST_REST / 1000)) if members >= MANY else 0.0
