"""A node's part in its group: the processes of its ranks, and copies of their state on the next node."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from stoker import sockets
from stoker.errors import UserError
from stoker.job.load_job import check_document
from stoker.launch.first_failure import failure_of
from stoker.launch.nodes.agent import Agent, ended_message
from stoker.launch.nodes.channel import Address, Message
from stoker.launch.nodes.folder_hold import FolderHold
from stoker.launch.nodes.group import Group, Node
from stoker.launch.nodes.neighbour_copies import Keeper, Sender
from stoker.launch.nodes.place import Place
from stoker.launch.run_spec import RunSpec
from stoker.runs.shared_memory import shared_memory
from stoker.runs.shm_folder import CUT, SUPERVISOR, SharedFolder


class NodePart:
    """Executes the leader's commands.

    Args:
        spec: the whole job, as it would run with all nodes.
        agent: starts, watches and ends the processes.
        address: that sockets of this node are bound to.
        tell: sends messages to the leader.
        say: prints a line for the user.

    Attributes:
        group: the last group that the leader announced.
        keeper: stores the copies of another node's ranks.
    """

    def __init__(
        self,
        spec: RunSpec,
        place: Place,
        folder: FolderHold,
        agent: Agent,
        *,
        address: str,
        tell: Callable[[Message], None],
        say: Callable[[str], None],
    ) -> None:
        self._spec, self._place, self._folder, self._agent = spec, place, folder, agent
        self._address, self._tell, self._say = address, tell, say
        self._name = place.node.name
        self.group: Group | None = None
        self._pending: tuple[Group, float] | None = None  # a start whose folder is not seen yet
        self._store: socket.socket | None = None
        self._stack = ExitStack()
        self._shared: SharedFolder | None = None
        self._sender: Sender | None = None
        self.keeper = Keeper(self._copies_folder)

    @property
    def generation(self) -> int:
        """The group's generation; 0 before the first group."""
        return self.group.generation if self.group is not None else 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends all of it; the folder in shared memory gets the error that ends the run."""
        try:
            self.abandon()
            self.keeper.close()
        finally:
            self._stack.__exit__(kind, error, trace)

    def turn(self, now: float) -> None:
        """Runs one iteration of the node's loop."""
        self._start_pending(now)
        self._agent.look(now)

    def do(self, message: Message, now: float) -> None:
        """Executes a command of the leader."""
        match message["kind"]:
            case "start":
                self.abandon()
                self.group = Group.of(message["group"])
                self.keeper.close()
                if self.group.member(self._name) is not None:
                    self._pending = self.group, now
                    self._start_pending(now)
            case "end":
                if self._pending is not None:
                    self._pending = None
                    self._tell(ended_message())
                self._agent.end(float(message["grace"]))
            case "pause":
                self._agent.pause()
            case "stacks":
                self._agent.stacks()
            case "signal":
                self._agent.hand_on([int(number) for number in message["numbers"]])

    def abandon(self) -> None:
        """Kills the processes without a report, since the leader is gone."""
        self._agent.abandon()
        self._pending = None
        self.stop_copies()

    def open_store(self, first: Node) -> Address:
        """Opens the socket of the rendezvous store of several nodes; returns the store's address.

        If rank 0 is on another node, the store is there, at the same port, and its process opens the socket.

        Args:
            first: node of rank 0.
        """
        store = sockets.listen((self._address, 0))
        port: int = store.getsockname()[1]
        if first.name == self._name:
            self._store = store
        else:
            store.close()
        return first.address[0], port

    def stop_copies(self) -> None:
        """Sends no further copies to the next node."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def asked_cut(self) -> float | None:
        """Returns the seconds for which a rehearsal cuts this node off, once; None without such a request."""
        asked = self._shared.path / CUT if self._shared is not None else None
        if asked is None or not asked.exists():
            return None
        seconds = float(asked.read_text())
        asked.unlink()
        return seconds

    def _start_pending(self, now: float) -> None:
        """Starts the processes, once the run's folder is seen here."""
        if self._pending is None:
            return
        group, since = self._pending
        member = group.member(self._name)
        assert member is not None
        try:
            if not self._folder.is_seen(group, now - since, node=self._name):
                return
            self._pending = None
            spec = self._spec_of(group)
            self._shared = self._shared or self._stack.enter_context(shared_memory(self._spec.output))
        except UserError as error:
            self._pending = None
            self._tell(ended_message(failures=[asdict(failure_of(error, member.first))]))
            return
        spec.logs.mkdir(parents=True, exist_ok=True)
        (self._shared.path / SUPERVISOR).write_text(str(os.getpid()))
        last = member.first + member.count - 1
        self._say(f"node {self._name}: rank {member.first} to {last} of {group.world}")
        store, self._store = self._store, None
        self._agent.start(spec, group, self._shared, store if member.first == 0 else None)
        self._begin_copies(group)

    def _spec_of(self, group: Group) -> RunSpec:
        """Returns the job as the group runs it."""
        if group.job is None:
            return self._spec
        document = replace(self._spec.loaded.document, data=group.job, nodes=group.nodes)
        return replace(self._spec, loaded=check_document(document))

    def _copies_folder(self) -> tuple[Path, int] | None:
        """Returns the folder for copies of other nodes' ranks, and the generation."""
        if self._shared is None or self.group is None:
            return None
        return self._shared.path, self.group.generation

    def _begin_copies(self, group: Group) -> None:
        """Has the copies of this node's ranks sent to the next node."""
        neighbour, member, previous = group.after(self._name), group.member(self._name), group.before(self._name)
        if neighbour is None or member is None or self._shared is None:
            return
        self._sender = Sender(
            self._shared.path,
            member.ranks,
            neighbour.node,
            generation=group.generation,
            source=self._address,
            secret=self._place.secret,
            output=self._spec.output,
            name=self._name,
            kept=previous.ranks if previous is not None else (),
        )
