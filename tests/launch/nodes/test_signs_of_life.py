"""When a node counts as lost, and how many heartbeats it may miss."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.launch.nodes.agent import interval
from stoker.launch.nodes.signs_of_life import ALIVE, LONGEST, LOST, SignsOfLife


class Sent:
    """A connection that keeps what is sent."""

    def __init__(self) -> None:
        self.texts: list[bytes] = []

    def send_text(self, text: bytes) -> None:
        self.texts.append(text)


def given(nodes: int, seconds: int, *, reports_every: float = 0.0) -> int:
    """Heartbeats that a node sends its leader, asked once a second."""
    peer: Any = Sent()
    signs = SignsOfLife()
    for now in range(1000, 1000 + seconds):
        if reports_every and (now - 1000) % reports_every == 0:
            signs.sent(peer, now)
        signs.give([peer], nodes, now)
    assert set(peer.texts) <= {ALIVE}
    return len(peer.texts)


@pytest.mark.parametrize(("nodes", "limit"), [(2, LOST), (100, LOST), (1000, LONGEST), (5000, LONGEST)])
def test_a_silent_node_is_lost_in_time_and_may_miss_two_heartbeats(nodes: int, limit: float) -> None:
    peer: Any = object()
    signs = SignsOfLife()
    signs.received(peer, 1000.0)
    assert not signs.silent([peer], nodes, 1000.0 + limit)
    assert signs.silent([peer], nodes, 1000.1 + limit) == [peer]
    assert given(nodes, int(limit)) >= 3


@pytest.mark.parametrize("nodes", [2, 300, 1000])
def test_a_node_that_reports_is_fresh(nodes: int) -> None:
    peer: Any = object()
    signs = SignsOfLife()
    signs.received(peer, 1000.0)
    assert signs.is_fresh(peer, nodes, 1003.0 + interval(nodes))
    assert not signs.is_fresh(peer, nodes, 1006.0 + 1.1 * interval(nodes))


@pytest.mark.parametrize("nodes", [300, 1000])
def test_a_node_that_reports_gives_no_other_heartbeat(nodes: int) -> None:
    assert given(nodes, 60, reports_every=interval(nodes)) == 0
