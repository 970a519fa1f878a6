"""A node's place among the nodes of a run."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.launch.nodes.channel import Address
from stoker.launch.nodes.group import Node


@dataclass(frozen=True)
class Place:
    """This node among the nodes of a run.

    Attributes:
        node: its description for the others.
        rendezvous: addresses at which nodes are searched for.
        least, most: minimum and maximum number of nodes.
        secret: shared by all nodes.
    """

    node: Node
    rendezvous: tuple[Address, ...]
    least: int
    most: int
    secret: bytes
