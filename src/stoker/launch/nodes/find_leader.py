"""Finds the group's leader, or decides that this node leads. It has no clock and no socket of its own.

The addresses that a node knows are ordered: those of the last group, then those of the rendezvous. A node that starts,
or that has lost its leader, asks all of them for their leader, and follows any leader that is named. It leads if no
node before it answers and no node after it follows another; it waits for a node before it that is searching, too.
A node that is in neither list never leads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from stoker.launch.nodes.channel import Address

AGAIN = 0.5  # seconds between two questions to the same address
FOUND = 15.0  # seconds that the nodes before it get to start, before a node founds a group itself
PATIENCE = 60.0  # seconds after which a node that answers, but has found no leader, is waited for no longer


@dataclass(frozen=True)
class GroupReply:
    """A supervisor's answer about its group.

    Attributes:
        leader: address of its leader; None if it knows none.
        generation: of its group's last start; 0 before the first.
        members: number of nodes that its leader has.
    """

    leader: Address | None
    generation: int
    members: int

    def plain(self) -> dict[str, Any]:
        """Returns its fields for a message."""
        return vars(self)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Restores an answer from the output of `plain`."""
        leader = values["leader"]
        found = (str(leader[0]), int(leader[1])) if leader else None
        return cls(found, int(values["generation"]), int(values["members"]))


@dataclass(frozen=True)
class Follow:
    """The node is to join the leader at an address."""

    leader: Address


@dataclass(frozen=True)
class Lead:
    """The node is to lead."""


class Search:
    """One search for the leader.

    Args:
        order: the addresses in order of precedence.
        own: this node's.
        lost: leaders that were just lost; answers that still name one are ignored.
        generation: of the group that this node was in; 0 if in none, so that others may still be starting.
    """

    def __init__(
        self, order: Sequence[Address], own: Address, *, now: float, lost: Sequence[Address] = (), generation: int
    ) -> None:
        self._order = list(dict.fromkeys(order))
        self._own, self._lost, self._generation, self._began = own, set(lost), generation, now
        self._asked: dict[Address, float] = {}
        self._answers: dict[Address, GroupReply | None] = {}  # None: it did not answer

    def to_ask(self, now: float) -> list[Address]:
        """Returns the addresses to ask now; each is asked again after a while."""
        due = [a for a in self._order if a != self._own and now - self._asked.get(a, -AGAIN) >= AGAIN]
        self._asked |= dict.fromkeys(due, now)
        return due

    def answered(self, address: Address, answer: GroupReply) -> None:
        """Records the answer of an address."""
        self._answers[address] = answer
        if answer.leader is not None and answer.leader not in self._order:
            self._order.append(answer.leader)

    def failed(self, address: Address) -> None:
        """Records that an address does not answer."""
        self._answers[address] = None

    def decide(self, now: float) -> Follow | Lead | None:
        """Returns the node's decision; None while it is open."""
        if found := self._leaders():
            return Follow(found[0])
        if self._own not in self._order:
            return None
        place = self._order.index(self._own)
        others = [address for address in self._order if address != self._own]
        if any(address not in self._answers for address in others):
            return None
        before = self._order[:place]
        waited = now - self._began
        there = {address: answer for address, answer in self._answers.items() if answer is not None}
        if waited < PATIENCE and any(
            address in before or a.generation > self._generation for address, a in there.items()
        ):
            return None
        if before and not self._generation and waited < FOUND:
            return None
        return Lead()

    def _leaders(self) -> list[Address]:
        """Returns the leaders that answer or are named, but for those that are silent; the newest generation first."""
        named = [answer for answer in self._answers.values() if answer is not None and answer.leader is not None]
        good = [
            (answer.generation, answer.members, answer.leader)
            for answer in named
            if answer.leader is not None
            and answer.leader != self._own
            and answer.leader not in self._lost
            and self._answers.get(answer.leader, answer) is not None
        ]
        return [leader for *_, leader in sorted(good, key=lambda entry: entry[:2], reverse=True)]
