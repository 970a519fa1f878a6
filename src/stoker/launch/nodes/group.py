"""The nodes of a run: their names and addresses, the ranks of each, and their order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Self

from stoker.launch.nodes.channel import Address


@dataclass(frozen=True)
class Node:
    """A node that can take part.

    Attributes:
        name: as messages show it; no other node of the run has it.
        address: where its supervisor listens; empty host where it is the only node.
        devices: numbers of the devices that it trains on, one process each.
        spare: whether it waits until another is lost.
        job: digest of the job that it was given.
    """

    name: str
    address: Address
    devices: tuple[int, ...]
    spare: bool = False
    job: str = ""

    @classmethod
    def of(cls, values: Sequence[Any]) -> Self:
        """Restores a node from the output of `plain`."""
        name, host, port, devices, spare, job = values
        numbers = range(devices) if isinstance(devices, int) else devices
        return cls(str(name), (str(host), int(port)), tuple(map(int, numbers)), bool(spare), str(job))

    def plain(self, *, job: bool = True) -> list[Any]:
        """Returns its fields for a message, in a short form, as a group may have a thousand nodes.

        Args:
            job: whether to include the job's digest, which is the same within a group.
        """
        all_first = self.devices == tuple(range(len(self.devices)))
        devices = len(self.devices) if all_first else list(self.devices)
        return [self.name, *self.address, devices, int(self.spare), self.job if job else ""]


@dataclass(frozen=True)
class Member:
    """A node in a group: its ranks are ``first`` to ``first + count - 1``."""

    node: Node
    first: int
    count: int

    @property
    def ranks(self) -> range:
        return range(self.first, self.first + self.count)

    @property
    def processes(self) -> Iterator[tuple[int, int, int]]:
        """Rank, local rank and number of the device of each process."""
        return zip(self.ranks, range(self.count), self.node.devices, strict=False)


@dataclass(frozen=True)
class Group:
    """The nodes that train together from one start of the processes to the next.

    Attributes:
        generation: the number of the start; a higher one is later.
        members: in the order of their ranks; the first leads, and the next ones succeed it in this order.
        others: nodes that are connected and have no ranks.
        store: host and port of the rendezvous store; None on one node.
        mark: name of the marker file in the run's folder.
        job: the job's document if it differs from the one that every node was given; else None.
        policy: the state of the restart policy; see `stoker.launch.restart_policy.Restarts`.
        longest: seconds of the longest evaluation and save so far, by phase.
        out: names and hosts of nodes that are left out for the rest of the run.
    """

    generation: int
    members: tuple[Member, ...]
    others: tuple[Node, ...] = ()
    store: Address | None = None
    mark: str = ""
    job: dict[str, Any] | None = None
    policy: Mapping[str, Any] | None = None
    longest: Mapping[str, float] | None = None
    out: tuple[tuple[str, str], ...] = ()

    @property
    def world(self) -> int:
        """Processes in all."""
        return sum(member.count for member in self.members)

    @property
    def nodes(self) -> int:
        """Nodes with ranks, where all have equally many; else 1."""
        return equal_nodes(self.members)

    @cached_property
    def _by_name(self) -> dict[str, Member]:
        return {member.node.name: member for member in self.members}

    def member(self, name: str) -> Member | None:
        """Returns the member of a name."""
        return self._by_name.get(name)

    def after(self, name: str) -> Member | None:
        """Returns the member that keeps copies of a node's state: the next one, in a ring; None if it is alone."""
        return self._neighbour(name, 1)

    def before(self, name: str) -> Member | None:
        """Returns the member whose copies a node keeps: the previous one, in a ring; None if it is alone."""
        return self._neighbour(name, -1)

    def _neighbour(self, name: str, distance: int) -> Member | None:
        names = [member.node.name for member in self.members]
        if len(names) < 2 or name not in names:
            return None
        return self.members[(names.index(name) + distance) % len(names)]

    def node_of(self, rank: int) -> Member:
        """Returns the member that has a rank."""
        return next(member for member in self.members if rank in member.ranks)

    def plain(self) -> dict[str, Any]:
        """Returns its fields for a message."""
        members = [[m.node.plain(job=False), m.first, m.count] for m in self.members]
        others = [node.plain(job=False) for node in self.others]
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**values, "members": members, "others": others}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Restores a group from the output of `plain`."""
        members = tuple(Member(Node.of(node), int(first), int(count)) for node, first, count in values["members"])
        store = values["store"]
        return cls(
            generation=int(values["generation"]),
            members=members,
            others=tuple(Node.of(node) for node in values["others"]),
            store=(str(store[0]), int(store[1])) if store else None,
            mark=str(values["mark"]),
            job=values["job"],
            policy=values["policy"],
            longest=values["longest"],
            out=tuple((str(name), str(host)) for name, host in values["out"]),
        )


def assign_ranks(nodes: Sequence[Node], world: int) -> tuple[Member, ...]:
    """Assigns ``world`` ranks to the nodes in order; nodes beyond them get none."""
    members, first = [], 0
    for node in nodes:
        count = min(len(node.devices), world - first)
        if count > 0:
            members.append(Member(node, first, count))
            first += count
    return tuple(members)


def equal_nodes(members: Sequence[Member]) -> int:
    """Returns the number of nodes where each has equally many ranks; else 1."""
    return len(members) if len({member.count for member in members}) == 1 else 1


def select_training_nodes(nodes: Sequence[Node], most: int, *, before: Sequence[str] = ()) -> list[Node]:
    """Selects the nodes that train: those of the last group, then others, then spares; at most ``most`` of them.

    Args:
        before: names of the nodes of the last group, in their order.
    """
    known = {name: at for at, name in enumerate(dict.fromkeys(before))}
    order = sorted(nodes, key=lambda node: (node.name not in known, known.get(node.name, 0), node.spare))
    return order[:most]
