"""A node that does not pass its test, where lost nodes are replaced."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from simulated_nodes import Cluster, consequence, fails_test, killed, node, ranks

from stoker.errors import CannotRun
from stoker.launch.nodes.group import Group
from stoker.launch.nodes.leader import RETURN
from stoker.launch.nodes.roster import SETTLED
from stoker.resilience.driver_log import GpuFault


@pytest.mark.parametrize(
    ("spare", "least", "out", "left"),
    [
        (True, 3, [2], {"a": [0, 1], "c": [2, 3], "s": [4, 5]}),  # one bad device: the whole node is replaced
        (False, 2, [2, 3], {"a": [0, 1], "c": [2, 3]}),
        (False, 2, [0], {"b": [0, 1], "c": [2, 3]}),  # the leader's own: it leads without ranks
    ],
)
def test_a_bad_node_is_replaced_by_a_spare_or_left_out_where_enough_are_left(
    tmp_path: Path, spare: bool, least: int, out: list[int], left: dict[str, list[int]]
) -> None:
    cluster = Cluster(tmp_path, least=least)
    cluster.join(node("b"), node("c"), *([node("s", spare=True)] if spare else []))
    cluster.after(0.0)
    before = cluster.started()
    bad = before.node_of(out[0]).node
    fails_test(cluster, before, out)
    assert cluster.leader.outcome is None
    cluster.after(0.0)
    group = cluster.started()
    assert ranks(group) == left and group.out == ((bad.name, bad.address[0]),)
    (event,) = cluster.events("left_out")
    assert event["nodes"] == [bad.name] and f"{bad.name} does not pass its test" in event["why"]
    assert any(f"going on without node {bad.name} for the rest of the run" in words for words in cluster.words)
    assert not cluster.events("fault") and not cluster.events("shrunk")

    # It comes again, first to this leader and then to the next one: it is not taken in, and does not count.
    cluster.pulses(dict.fromkeys(range(group.world), 2), done=5)
    if bad.name != "a":
        cluster.leader.left(bad.name, cluster.now)
        cluster.join(bad)
        cluster.after(2 * SETTLED)
        assert not cluster.take("pause") and cluster.leader.nodes[bad.name].devices == ()
    last = group.members[-1].node.name
    first = next(name for name in left if name not in (bad.name, last))
    after = Cluster(tmp_path, least=least, me=node(first), group=Group.of(json.loads(json.dumps(group.plain()))))
    after.join(bad, *(member.node for member in group.members[:-1] if member.node.name != first))
    after.after(10 * RETURN)
    assert not after.sent and after.released
    after.join(node(last))
    after.after(0.0)
    assert sorted(ranks(after.started())) == sorted(left)


def test_where_all_nodes_fail_the_test_none_of_them_is_blamed(tmp_path: Path) -> None:
    """A wrong sum over all nodes says nothing about one of them."""
    cluster = Cluster(tmp_path, least=1)
    cluster.join(node("b"), node("c"), node("s", spare=True))
    cluster.after(0.0)
    group = cluster.started()
    fails_test(cluster, group, [0], everywhere=True)
    assert isinstance(cluster.leader.outcome, CannotRun) and not cluster.events("left_out")


def test_a_node_whose_gpu_is_lost_is_replaced_by_a_spare(tmp_path: Path) -> None:
    """Its processes were killed, which alone would restart them on the same node."""
    cluster = Cluster(tmp_path)
    cluster.join(node("b"), node("c"), node("s", spare=True))
    cluster.after(0.0)
    group = cluster.started()
    fault = GpuFault(2, "0000:1b:00", (79,), "bus", "Node Reboot Required", lost=True)
    for name in "abc":
        own = [asdict(fault)] if name == "b" else []
        failures = [asdict(killed(2) if name == "b" else consequence(group.members["abc".index(name)].first))]
        out = [2] if name == "b" else []
        cluster.says(name, "ended", result=None, failures=failures, gpu_faults=json.loads(json.dumps(own)), out=out)
    cluster.after(0.0)
    group = cluster.started()
    assert ranks(group) == {"a": [0, 1], "c": [2, 3], "s": [4, 5]}
    assert group.policy is not None and group.policy["count"] == 0  # of the nodes that are left
    (event,) = cluster.events("gpu_fault")
    assert (event["node"], event["rank"], event["xids"], event["kind"]) == ("b", 2, [79], "bus")
    (left,) = cluster.events("left_out")
    assert "rank 2: NVIDIA's driver reported Xid 79" in left["why"] and "Node Reboot Required" in left["why"]


def test_a_bad_node_ends_the_run_where_too_few_are_left(three: Cluster) -> None:
    group = three.leader.group
    assert group is not None
    fails_test(three, group, [2, 3])
    assert isinstance(three.leader.outcome, CannotRun) and "b does not pass its test" in str(three.leader.outcome)
    assert not three.events("left_out") and three.leader.nodes["b"].devices == (0, 1)
