"""Where a node stands among those of a run."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.launch.nodes.channel import Address
from stoker.launch.nodes.group import Node


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
