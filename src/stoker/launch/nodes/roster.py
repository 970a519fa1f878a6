"""The connected nodes of a run, and the job's layout on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import gcd

from stoker.hardware.machines.cluster import Cluster
from stoker.hardware.machines.detect_machine import this_machine, this_processor
from stoker.launch.nodes.addresses import host_and_port
from stoker.launch.nodes.channel import Address
from stoker.launch.nodes.group import Group, Node, assign_ranks, equal_nodes, select_training_nodes
from stoker.launch.run_spec import RunSpec
from stoker.launch.shrink import with_fewer

NAMED = 3  # addresses that a line names
SETTLED = 3.0  # seconds from a node's arrival until the processes are stopped for it; others may come, too


class Roster:
    """The connected nodes.

    Args:
        spec: the whole job, as it would run with all nodes.
        me: the leader's node; its name is empty if it is the only one.
        most: maximum number of nodes.
        nccl: whether devices are GPUs.
        rendezvous: addresses at which nodes are expected.
        machine: describes some of this machine's devices; by default its GPUs with `nccl`, else its processor.

    Attributes:
        nodes: by name.
    """

    def __init__(
        self,
        spec: RunSpec,
        me: Node,
        *,
        most: int,
        nccl: bool,
        now: float,
        rendezvous: Sequence[Address] = (),
        machine: Callable[[int], Cluster] | None = None,
    ) -> None:
        self._rendezvous = rendezvous
        self._machine = machine or (this_machine if nccl else this_processor)
        self._full, self.me, self._most, self._nccl = spec, me, most, nccl
        self.nodes: dict[str, Node] = {me.name: me}
        self._since: dict[str, float] = {me.name: now}
        self._out: set[tuple[str, str]] = set()  # names and hosts of nodes that are left out for the rest of the run
        self._grown: tuple[frozenset[str], bool] | None = None
        self._fewer: tuple[list[Node], RunSpec | None] | None = None  # the job for the last nodes that were too few

    @property
    def is_multi(self) -> bool:
        """Returns whether a run may have several nodes."""
        return bool(self.me.name)

    @property
    def able(self) -> list[Node]:
        """Nodes with devices that are not left out."""
        return [node for node in self.nodes.values() if node.devices]

    @property
    def regular(self) -> int:
        """Nodes that can train and are not spares."""
        return sum(not node.spare for node in self.able)

    @property
    def out(self) -> tuple[tuple[str, str], ...]:
        """Names and hosts of nodes that are left out for the rest of the run."""
        return tuple(sorted(self._out))

    def leave_out(self, out: Iterable[tuple[str, str]]) -> None:
        """Leaves out nodes, by name and host, for the rest of the run; they may stay connected."""
        self._out.update(out)
        self.nodes = {name: self._as_taken(node) for name, node in self.nodes.items()}

    def _as_taken(self, node: Node) -> Node:
        return replace(node, devices=()) if (node.name, node.address[0]) in self._out else node

    def absent(self) -> str:
        """Returns the first addresses of the rendezvous at which no node is; empty if there is none."""
        here = {node.address for node in self.nodes.values()}
        away = [host_and_port(address) for address in self._rendezvous if address not in here]
        return ", ".join([*away[:NAMED], *(["..."] if len(away) > NAMED else [])])

    def add(self, node: Node, now: float) -> None:
        """Adds a node."""
        self.nodes[node.name] = self._as_taken(node)
        self._since[node.name] = now

    def remove(self, name: str) -> None:
        """Removes a node."""
        self.nodes.pop(name, None)

    def is_whole(self, spec: RunSpec) -> bool:
        """Returns whether a job is the one for all nodes."""
        return spec.loaded.document is self._full.loaded.document

    def candidates(self, group: Group | None) -> tuple[list[Node], RunSpec | None]:
        """Returns the nodes that would train, and the job for them; None instead of a job if no layout fits.

        Args:
            group: the last one, whose nodes come first.
        """
        before = [member.node.name for member in group.members] if group else []
        nodes = select_training_nodes(self.able, self._most, before=[self.me.name, *before])
        total = sum(len(node.devices) for node in nodes)
        if total >= self._full.layout.world:
            return nodes, self._full
        if self._fewer is None or self._fewer[0] != nodes:  # a leader without a layout asks again and again
            self._fewer = nodes, self._with_fewer(nodes, total) if total else None
        return self._fewer

    def _with_fewer(self, nodes: Sequence[Node], total: int) -> RunSpec | None:
        """Returns the job for nodes with ``total`` devices, fewer than it needs; None if no layout fits."""
        full = self._full
        fewer = with_fewer(
            full.loaded,
            full.read or full.loaded.document,
            devices=None,
            left=total,
            nodes_of=lambda world: equal_nodes(assign_ranks(nodes, world)),
            cluster_of=lambda world: self._cluster(nodes, world),
        )
        return replace(full, loaded=fewer) if fewer is not None else None

    def _cluster(self, nodes: Sequence[Node], world: int) -> Cluster:
        """Returns the devices of nodes, for the planner: they are taken to be like this machine's.

        Where nodes have different numbers of devices, it is as if they were cut into equal smaller ones.
        """
        per_node = gcd(*(member.count for member in assign_ranks(nodes, world)))
        return self._machine(per_node).with_nodes(world // per_node)

    def can_grow(self, group: Group, now: float) -> bool:
        """Returns whether new nodes allow a larger layout."""
        new = [name for name in self.nodes if group.member(name) is None]
        if not new or any(now - self._since[name] < SETTLED for name in new):
            return False
        names = frozenset(self.nodes)
        if self._grown is None or self._grown[0] != names:
            spec = self.candidates(group)[1]
            self._grown = names, spec is not None and spec.layout.world > group.world
        return self._grown[1]

    def started(self) -> None:
        """Records that the processes have been started with a group of these nodes."""
        self._grown = None

    def without(self, lost: Sequence[int], group: Group) -> RunSpec | None:
        """Removes the devices of ranks; returns the job for the remaining ones. None, and nothing is changed, if no
        layout fits them.
        """
        if not self.is_multi:
            return self._without_here(lost)
        nodes = dict(self.nodes)
        for rank in lost:
            member = group.node_of(rank)
            device = member.node.devices[rank - member.first]
            node = self.nodes.get(member.node.name)
            if node is None:  # it has left
                continue
            left = tuple(number for number in node.devices if number != device)
            self.nodes[node.name] = replace(node, devices=left)
        spec = self.candidates(group)[1]
        if spec is None:
            self.nodes = nodes
        return spec

    def without_nodes(self, bad: Sequence[Node], group: Group, *, least: int) -> RunSpec | None:
        """Leaves out nodes; returns the job for the others. None, and nothing is changed, if they are fewer than
        ``least`` or no layout fits them.
        """
        nodes, before = self.nodes, self._out
        self._out = set(before)
        self.leave_out((node.name, node.address[0]) for node in bad)
        spec = self.candidates(group)[1] if len(self.able) >= least else None
        if spec is None:
            self.nodes, self._out = nodes, before
        return spec

    def _without_here(self, lost: Sequence[int]) -> RunSpec | None:
        spec, world = self._full, self._full.layout.world
        devices = None
        if self._nccl:
            named = spec.devices or range(world)
            devices = [device for rank, device in enumerate(named) if rank not in lost]
        read = spec.read or spec.loaded.document
        left = world - len(lost)
        if left < 1:
            return None
        fewer = with_fewer(spec.loaded, read, devices=devices, left=left, cluster_of=self._machine)
        if fewer is None:
            return None
        self._full = replace(spec, loaded=fewer)
        self.nodes[self.me.name] = self.me = replace(self.me, devices=tuple(range(self._full.layout.world)))
        return self._full
