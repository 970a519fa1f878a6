"""Heartbeats between nodes: a node that is silent for too long counts as lost."""

from __future__ import annotations

from collections.abc import Iterable

from stoker.launch.nodes.agent import interval
from stoker.launch.nodes.channel import Peer, text_of

LOST = 10.0  # seconds of silence after which a node counts as lost; four heartbeat intervals if that is longer
ALIVE = text_of({"kind": "alive"})
LONGEST = 30.0  # seconds of that limit, at most; a host that cannot be reached is noticed earlier (`UNREACHABLE`)


class SignsOfLife:
    """The times of the last messages from and to other nodes."""

    def __init__(self) -> None:
        self._received: dict[Peer, float] = {}
        self._sent: dict[Peer, float] = {}

    def received(self, peer: Peer, now: float) -> None:
        """Records that a node has sent a message, or that its connection is established."""
        self._received[peer] = now

    def sent(self, peer: Peer, now: float) -> None:
        """Records that a message was sent to a node."""
        self._sent[peer] = now

    def forget(self, peer: Peer) -> None:
        """Forgets a node whose connection has ended."""
        self._received.pop(peer, None)
        self._sent.pop(peer, None)

    def is_fresh(self, peer: Peer, nodes: int, now: float) -> bool:
        """Returns whether a node has been heard recently, in a group of ``nodes`` nodes."""
        return now - self._received.get(peer, 0.0) < LOST / 2 + _every(nodes) - 1.0

    def silent(self, peers: Iterable[Peer], nodes: int, now: float) -> list[Peer]:
        """Returns the nodes that count as lost, in a group of ``nodes`` nodes."""
        since = now - min(LONGEST, max(LOST, 4 * _every(nodes)))
        return [peer for peer in peers if self._received.get(peer, now) < since]

    def give(self, peers: Iterable[Peer], nodes: int, now: float) -> None:
        """Sends a heartbeat to the nodes that got no other message recently."""
        since = now - _every(nodes)
        for peer in [peer for peer in peers if self._sent.get(peer, 0.0) <= since]:
            self.sent(peer, now)
            peer.send_text(ALIVE)


def _every(nodes: int) -> float:
    """Returns the seconds between two heartbeats."""
    return max(1.0, 1.1 * interval(nodes))  # a node that reports gives no other heartbeat
