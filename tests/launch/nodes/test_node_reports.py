"""Reports of nodes: heartbeats of all processes in one message, taken together where nodes are many."""

from __future__ import annotations

import json

from stoker.launch.nodes.agent import message_of, pulses_of
from stoker.launch.nodes.node_supervisor import MANY, POLL, poll_interval
from stoker.resilience.heartbeat import Pulse


def test_a_report_names_a_value_once_that_all_processes_have() -> None:
    pulses = {
        rank: Pulse(100.0 - rank, "train", 8, 7, 7, 0.5 + rank, 2.0, 0.0, 0.0, 0.0 if rank < 6 else 1.5)
        for rank in (4, 5, 6)
    }
    message = message_of(pulses, 101.0)
    assert message["fields"][:6] == ["train", 8, 7, 7, [4.5, 5.5, 6.5], 2.0]
    assert pulses_of(json.loads(json.dumps(message)), 101.0) == pulses
    alone = {9: pulses[4]}
    assert pulses_of(json.loads(json.dumps(message_of(alone, 101.0))), 101.0) == alone


def test_messages_of_many_nodes_are_taken_together() -> None:
    assert poll_interval(0) == poll_interval(MANY - 1) == 0.0
    assert 0.0 < poll_interval(MANY) == POLL < poll_interval(1000) == poll_interval(10_000)
