"""The order of nodes in a group, and the ranks of each."""

from __future__ import annotations

from dataclasses import replace

from simulated_nodes import node

from stoker.launch.nodes.group import Group, Node, assign_ranks, select_training_nodes


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


def test_neighbours_are_those_of_a_ring() -> None:
    group = Group(1, assign_ranks([node(name, 2) for name in "abc"], 6))
    around = [(group.before(name), group.after(name)) for name in "abc"]
    assert [(b and b.node.name, a and a.node.name) for b, a in around] == [("c", "b"), ("a", "c"), ("b", "a")]
    alone = Group(1, assign_ranks([node("a", 2)], 2))
    assert alone.after("a") is None and alone.before("a") is None and group.after("d") is None
    assert group.nodes == 3 and Group(1, assign_ranks([node("a", 2), node("b", 2)], 3)).nodes == 1


def test_a_node_is_restored_from_its_message() -> None:
    for sent in (node("a", 2, spare=True), replace(node("a", 4), devices=(1, 3))):
        assert Node.of(sent.plain()) == sent
