"""The order of nodes in a group, and the ranks of each."""

from __future__ import annotations

from dataclasses import replace

from simulated_nodes import node

from stoker.launch.nodes.group import assign_ranks, select_training_nodes


def test_nodes_keep_their_order_and_spares_come_last() -> None:
    nodes = [node("s", spare=True), node("d"), node("b"), node("c")]
    assert [n.name for n in select_training_nodes(nodes, 3, before=["c", "b", "c"])] == ["c", "b", "d"]
    assert [(m.node.name, m.first, m.count) for m in assign_ranks([node("a", 3), node("b", 3)], 4)] == [
        ("a", 0, 3),
        ("b", 3, 1),
    ]


def test_local_ranks_begin_at_0_where_the_first_device_is_left_out() -> None:
    (member,) = assign_ranks([replace(node("a", 4), devices=(1, 2, 3))], 2)
    assert list(member.processes) == [(0, 0, 1), (1, 1, 2)]
