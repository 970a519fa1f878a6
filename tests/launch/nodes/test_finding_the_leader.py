"""Who leads: the state machine of a node that looks for a leader, with a clock of the test's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stoker.launch.nodes.find_leader import AGAIN, FOUND, PATIENCE, Follow, GroupReply, Lead, Search
from stoker.launch.nodes.group_questions import PROBE, SLOW, GroupQuestions

A, B, C = (("10.0.0.1", 1), ("10.0.0.2", 1), ("10.0.0.3", 1))
NOBODY = GroupReply(None, 0, 1)


def search(own: tuple[str, int], *, generation: int = 0, lost: tuple[tuple[str, int], ...] = ()) -> Search:
    order = [a for a in (A, B, C) if a not in lost] + list(lost)
    return Search(order, own, now=0.0, lost=lost, generation=generation)


def test_the_first_of_the_rendezvous_founds_when_all_have_answered_or_are_not_there() -> None:
    first = search(A)
    assert first.to_ask(0.0) == [B, C] and first.to_ask(AGAIN / 2) == [] and first.to_ask(AGAIN) == [B, C]
    assert first.decide(0.0) is None
    first.answered(B, NOBODY)
    assert first.decide(0.0) is None
    first.failed(C)
    assert first.decide(0.0) == Lead()


def test_a_later_one_waits_for_those_before_it_to_start() -> None:
    second = search(B)
    second.failed(A)
    second.answered(C, NOBODY)
    assert second.decide(FOUND - 1) is None and second.decide(FOUND) == Lead()
    second.answered(A, NOBODY)  # it is there, and will lead
    assert second.decide(FOUND) is None and second.decide(PATIENCE) == Lead()
    second.answered(A, GroupReply(A, 0, 1))
    assert second.decide(FOUND) == Follow(A)


def test_a_group_is_followed_whoever_names_it_and_the_newest_of_two() -> None:
    third = search(C)
    third.answered(A, GroupReply(("10.0.0.9", 1), 3, 2))  # an address that was not known
    assert third.decide(0.0) == Follow(("10.0.0.9", 1))
    third.answered(B, GroupReply(B, 4, 1))
    assert third.decide(0.0) == Follow(B)


def test_a_leader_that_was_lost_is_not_believed_in_and_the_next_in_order_leads_at_once() -> None:
    second, third = search(B, generation=5, lost=(A,)), search(C, generation=5, lost=(A,))
    for each, other in ((second, C), (third, B)):
        each.failed(A)
        each.answered(other, GroupReply(A, 5, 3))  # it has not noticed yet
    assert second.decide(0.1) == Lead() and third.decide(0.1) is None
    third.answered(B, GroupReply(B, 5, 1))
    assert third.decide(0.2) == Follow(B)


def test_a_leader_that_does_not_answer_is_left() -> None:
    third = search(C)
    third.answered(B, GroupReply(A, 1, 2))
    assert third.decide(0.0) == Follow(A)
    third.failed(A)
    assert third.decide(0.0) is None


def test_who_has_forgotten_everything_does_not_found_beside_a_group_that_is_looking_for_its_leader() -> None:
    back = search(A)
    back.answered(B, GroupReply(None, 5, 1))
    back.answered(C, GroupReply(None, 5, 1))
    assert back.decide(1.0) is None
    back.answered(B, GroupReply(B, 5, 1))
    assert back.decide(1.5) == Follow(B)


def test_who_is_named_nowhere_never_leads() -> None:
    guest = Search([A], B, now=0.0, generation=0)
    guest.failed(A)
    assert guest.decide(1000.0) is None


def test_a_node_does_not_follow_itself() -> None:
    """Others still name the leader that this node was before it was restarted."""
    first = search(A)
    for other in (B, C):
        first.answered(other, GroupReply(A, 5, 3))
    assert first.decide(0.0) is None and first.decide(PATIENCE) == Lead()


def test_a_leader_that_is_named_is_asked_as_well() -> None:
    third, found = search(C), ("10.0.0.9", 1)
    third.answered(A, GroupReply(found, 3, 2))
    assert found in third.to_ask(0.0)
    third.failed(found)
    third.failed(B)
    assert third.decide(0.0) is None  # it does not answer


def test_of_two_groups_of_one_generation_the_larger_is_followed() -> None:
    third = search(C)
    third.answered(A, GroupReply(A, 4, 1))
    third.answered(B, GroupReply(B, 4, 2))
    assert third.decide(0.0) == Follow(B)


@dataclass(eq=False)
class Dialled:
    """A connection."""

    address: tuple[str, int]
    began: float = 0.0


class Network:
    """Connections that the test answers."""

    address, is_cut = C, False

    def __init__(self) -> None:
        self.dialled: list[tuple[str, int]] = []
        self.closed: list[Any] = []

    def dial(self, address: tuple[str, int]) -> Any:
        self.dialled.append(address)
        return Dialled(address)

    def close_peer(self, peer: Any) -> None:
        self.closed.append(peer)


def test_nodes_outside_of_the_group_are_asked_now_and_then_and_not_for_ever() -> None:
    network: Any = Network()
    questions = GroupQuestions(network)
    assert questions.is_probe_due(PROBE) and not questions.is_probe_due(PROBE - 0.1)
    questions.probe([A, B, C], [B], now=10.0)
    assert network.dialled == [A] and not questions.is_probe_due(11.0)
    questions.probe([A, B, C], [B], now=12.0)
    assert network.dialled == [A]  # its answer has not come
    (peer,) = questions._asked
    questions.drop_slow(SLOW)
    assert not network.closed
    questions.drop_slow(SLOW + 0.1)
    assert network.closed == [peer] and questions.went_down(peer) and not questions.went_down(peer)
    questions.probe([A, B, C], [B], now=14.0)
    (peer,) = questions._asked
    assert questions.answered(peer, NOBODY) and not questions.answered(peer, NOBODY)


def test_leaders_that_were_lost_are_asked_last() -> None:
    network: Any = Network()
    questions = GroupQuestions(network)
    questions.seek([A, B, C], 3, 0.0, lost=A)
    assert questions.look(0.0) is None and network.dialled == [B, A]
    for peer in list(questions._asked):
        if peer.address == B:
            assert not questions.answered(peer, GroupReply(A, 3, 3))  # it has not noticed yet
        else:
            questions.went_down(peer)
    assert questions.look(0.1) is None  # B comes first
    assert questions.look(AGAIN) is None and network.dialled == [B, A, B, A]
    for peer in list(questions._asked):
        questions.went_down(peer)
    assert questions.look(AGAIN) == Lead()
