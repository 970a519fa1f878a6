"""Other nodes of the run, asked for an object before its origin is.

Each object has one node that fetches it from the origin for all of them. Who the nodes are and how they are asked is
the supervisors' matter; see `stoker.launch.nodes.cache_exchange`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from stoker.node_cache.download import Feed


class CachePeers(Protocol):
    """The other nodes."""

    def feed(self, key: str) -> Feed | None:
        """What gives the object of a key; None where this node is the one that fetches it from the origin."""


_PEERS: list[CachePeers] = []  # one process takes part in one run


def use(peers: CachePeers | None) -> None:
    """Has this process ask other nodes from now on."""
    _PEERS[:] = [] if peers is None else [peers]


def feed(key: str) -> Feed | None:
    """What gives the object of a key instead of the origin; None where there are no other nodes, or not for this."""
    return _PEERS[0].feed(key) if _PEERS else None
