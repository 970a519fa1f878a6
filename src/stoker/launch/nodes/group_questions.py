"""Asks supervisors of other nodes for their groups, each over a separate connection."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stoker.launch.nodes.channel import Address, Peer, PeerNetwork
from stoker.launch.nodes.find_leader import Follow, GroupReply, Lead, Search

PROBE = 2.0  # seconds between two questions of a leader to nodes outside of its group
SLOW = 5.0  # timeout of an answer in seconds; the connection is then closed


class GroupQuestions:
    """Looks for a leader, and later for another leader's group.

    Attributes:
        lost: addresses of leaders that were lost since this node last followed one.
    """

    def __init__(self, network: PeerNetwork) -> None:
        self._network = network
        self._asked: dict[Peer, Address] = {}
        self._search: Search | None = None
        self._probed = 0.0
        self.lost: tuple[Address, ...] = ()

    def seek(self, known: Sequence[Address], generation: int, now: float, *, lost: Address | None = None) -> None:
        """Begins to look for a leader.

        Args:
            known: possible addresses of nodes, in order of precedence.
            generation: generation of this node's previous group; 0 if it was in none.
            lost: address of the leader that was just lost.
        """
        if lost is not None:
            self.lost = (*self.lost, lost)
        # Lost leaders are asked last: they may be back.
        order = [*(a for a in known if a not in self.lost), *(a for a in known if a in self.lost)]
        self._search = Search(order, self._network.address, now=now, lost=self.lost, generation=generation)
        if lost is not None:
            self._search.failed(lost)

    def look(self, now: float) -> Follow | Lead | None:
        """Asks the next nodes during a search for the leader; returns the decision, once there is one."""
        if self._search is None:
            return None
        self._ask(self._search.to_ask(now))
        decided = self._search.decide(now)
        if decided is not None:
            self._search = None
        return decided

    def is_probe_due(self, now: float) -> bool:
        """Returns whether it is time to call `probe`."""
        return now - self._probed >= PROBE and not self._network.is_cut

    def probe(self, known: Iterable[Address], here: Iterable[Address], now: float) -> None:
        """Asks nodes outside of this group for their leader, after a cut link or a late start."""
        self._probed = now
        with_it = {*here, self._network.address}
        self._ask([address for address in known if address not in with_it])

    def _ask(self, addresses: Sequence[Address]) -> None:
        pending = set(self._asked.values())
        for address in addresses:
            if address not in pending:
                self._asked[self._network.dial(address)] = address

    def came_up(self, peer: Peer) -> bool:
        """Returns whether an established connection was made for a question, and then sends the question."""
        if peer not in self._asked:
            return False
        peer.send({"kind": "who"})
        return True

    def went_down(self, peer: Peer) -> bool:
        """Returns whether a closed connection was made for a question."""
        address = self._asked.pop(peer, None)
        if address is not None and self._search is not None:
            self._search.failed(address)
        return address is not None

    def answered(self, peer: Peer, reply: GroupReply) -> bool:
        """Notes an answer; returns whether it is one to a question of `probe`."""
        address = self._asked.pop(peer, None)
        self._network.close_peer(peer)
        if address is None:
            return False
        if self._search is not None:
            self._search.answered(address, reply)
            return False
        return True

    def drop_slow(self, now: float) -> None:
        """Closes connections without an answer after the timeout."""
        for peer in [peer for peer in self._asked if now - peer.began > SLOW]:
            self._network.close_peer(peer)
