"""Other nodes of the run, which are asked for an object before its origin.

Each object has one node that fetches it from the origin for all of them. The supervisors know the nodes and how to ask
them; see `stoker.launch.nodes.cache_exchange`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from stoker.node_cache.download import Feed


class CachePeers(Protocol):
    """The other nodes."""

    def feed(self, key: str) -> Feed | None:
        """Returns a stream of the object of a key; None if this node is the one that fetches it from the origin."""


_PEERS: list[CachePeers] = []  # one process takes part in one run


def set_peers(peers: CachePeers | None) -> None:
    """Has this process ask other nodes from now on."""
    _PEERS[:] = [] if peers is None else [peers]


def stream_from_peers(key: str) -> Feed | None:
    """Returns a stream of the object from other nodes; None without other nodes, or if this one fetches it."""
    return _PEERS[0].feed(key) if _PEERS else None
