"""Which nodes and devices the leader goes on with, after some are lost, left out or have come."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

import pytest
from simulated_nodes import RESULT, Cluster, consequence, fails_test, killed, node, ranks

from stoker.errors import CannotRun, Problem
from stoker.job.layout import layout_of
from stoker.launch.first_failure import Failure
from stoker.launch.nodes.leader import JOIN, REMIND
from stoker.launch.nodes.roster import SETTLED, Roster


def test_a_lost_node_is_waited_for_where_all_are_needed(three: Cluster) -> None:
    three.pulses(dict.fromkeys(range(6), 3), done=3)
    three.ended("a", consequence(0))
    three.leader.left("c", three.now)
    assert [name for name, message in three.sent if message["kind"] == "end"][-1] == "b"
    three.ended("b", consequence(2))
    three.after(100.0)
    assert not three.take("start") and three.released > 0
    assert "node c has gone; waiting for 1 more node" in three.words
    three.join(node("d"))
    three.after(0.0)
    assert ranks(three.started()) == {"a": [0, 1], "b": [2, 3], "d": [4, 5]}
    (lost,), (fault,) = three.events("node_lost"), three.events("fault")
    assert (lost["node"], lost["ranks"], lost["step"]) == ("c", [4, 5], 3)
    assert (fault["rank"], fault["error"]) == (4, "node c has gone")


def test_a_spare_takes_the_place_of_a_lost_node_at_once(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    cluster.join(node("s", spare=True), node("b"), node("c"))
    cluster.after(0.0)
    group = cluster.started()
    assert ranks(group) == {"a": [0, 1], "b": [2, 3], "c": [4, 5]} and [o.name for o in group.others] == ["s"]
    cluster.leader.left("b", cluster.now)
    cluster.ended("a")
    cluster.ended("c")
    cluster.after(1.0)
    assert ranks(cluster.started()) == {"a": [0, 1], "c": [2, 3], "s": [4, 5]}


def test_fewer_nodes_go_on_with_a_smaller_layout_and_grow_again_losing_no_step(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, least=2)
    cluster.join(node("b"), node("c"))
    cluster.after(0.0)
    cluster.started()
    cluster.leader.left("b", cluster.now)
    cluster.ended("a")
    cluster.ended("c")
    cluster.after(1.0)
    group = cluster.started()
    assert ranks(group) == {"a": [0, 1], "c": [2, 3]} and group.job is not None and group.job["parallel"]["data"] == 4
    cluster.join(node("b"))
    cluster.after(SETTLED + 1)
    assert not cluster.take("pause")  # before the first step there is nothing to go on from
    cluster.pulses(dict.fromkeys(range(4), 2), done=5)
    cluster.after(1.0)
    assert cluster.take("pause").keys() == {"a", "c"}
    for name in "ca":
        cluster.ended(name, result={**RESULT, "state": "paused", "step": 6})
    cluster.after(0.0)
    group = cluster.started()
    assert ranks(group) == {"a": [0, 1], "c": [2, 3], "b": [4, 5]} and group.job is None
    assert [event["step"] for event in cluster.events("regrouped")] == [6] and len(cluster.events("fault")) == 1


@pytest.mark.parametrize(
    ("out", "spare", "left"),
    [
        ([2, 3], False, {"a": [0, 1], "c": [2, 3]}),  # a node of which nothing is left
        ([2], False, {"a": [0, 1], "b": [2], "c": [3]}),
        ([2, 3], True, {"a": [0, 1], "c": [2, 3], "s": [4, 5]}),
        ([0, 1], False, {"b": [0, 1], "c": [2, 3]}),  # the leader's own: it leads without ranks
    ],
)
def test_a_node_that_does_not_pass_its_test_is_left_out(
    tmp_path: Path, out: list[int], spare: bool, left: dict[str, list[int]]
) -> None:
    cluster = Cluster(tmp_path, more=", lost: shrink")
    cluster.join(node("b"), node("c"), *([node("s", spare=True)] if spare else []))
    cluster.after(0.0)
    before = cluster.started()
    bad = before.node_of(out[0]).node.name
    fails_test(cluster, before, out)
    assert cluster.leader.outcome is None
    cluster.after(0.0)  # without a back-off, as other devices train
    group = cluster.started()
    assert ranks(group) == left
    assert group.store == (group.members[0].node.address[0], 7)
    assert {each.name for each in group.others} == cluster.leader.nodes.keys() - left.keys()
    (shrunk,) = cluster.events("shrunk")
    assert shrunk["without"] == out and bad in shrunk["why"]
    assert cluster.leader.spec.layout.world == group.world and cluster.leader.spec.loaded.job.train.batch == 24
    assert (group.job is None) == spare and not cluster.events("fault")


@pytest.mark.parametrize("lost", ["replace", "shrink"])
def test_a_device_is_left_out_only_where_the_job_allows_it_and_a_layout_is_left(tmp_path: Path, lost: str) -> None:
    cluster = Cluster(tmp_path, 2, least=2, most=2, more=f", lost: {lost}", me=node("a", 1))
    cluster.join(node("b", 1))
    cluster.after(0.0)
    group = cluster.started()
    for member in group.members:
        out = [member.first] if lost == "shrink" or member.first else []
        failures = [asdict(killed(member.first))]
        cluster.says(member.node.name, "ended", result=None, failures=failures, gpu_faults=[], out=out)
    assert not cluster.events("shrunk") and len(cluster.events("fault")) == 1


def test_nodes_that_no_layout_fits_wait_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.launch.nodes.roster.with_fewer", lambda *_, **__: None)
    cluster = Cluster(tmp_path, 4, least=2, most=2, me=node("a", 1))
    cluster.join(node("b"))
    cluster.after(REMIND)
    cluster.after(1.0)
    assert not cluster.sent
    assert [words for words in cluster.words if "no layout of the job fits" in words] == cluster.words[-1:]


def test_a_device_whose_process_keeps_ending_at_one_step_is_left_out(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, more=", lost: shrink")
    cluster.join(node("b"), node("c"))
    cluster.after(0.0)
    for _ in range(2):
        assert ranks(cluster.started()) == {"a": [0, 1], "b": [2, 3], "c": [4, 5]}
        cluster.ended("b", killed(3))
        cluster.ended("a", consequence(0))
        cluster.ended("c", consequence(4))
        cluster.after(2.0)
    group = cluster.started()
    assert ranks(group) == {"a": [0, 1], "b": [2], "c": [3]}
    assert group.policy is not None and group.policy["count"] == 0  # of the devices that are left
    assert [event["without"] for event in cluster.events("shrunk")] == [[3]]
    assert cluster.leader.nodes["b"].devices == (0,)


def _ends_twice_at_one_step(cluster: Cluster) -> None:
    """The process of rank 3 does, which alone has its device left out."""
    for _ in range(2):
        cluster.started()
        cluster.ended("b", killed(3))
        cluster.ended("a", consequence(0))
        cluster.ended("c", consequence(4))
        cluster.after(4.0)


def test_all_devices_that_are_lost_with_a_process_that_keeps_ending_are_left_out(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, more=", lost: shrink")
    cluster.join(node("b"), node("c"))
    cluster.after(0.0)
    for out in ([], [2, 3]):
        cluster.started()
        cluster.says("b", "ended", result=None, failures=[asdict(killed(3))], gpu_faults=[], out=out)
        cluster.ended("a", consequence(0))
        cluster.ended("c", consequence(4))
        cluster.after(2.0)
    assert [event["without"] for event in cluster.events("shrunk")] == [[2, 3]]


def test_without_a_smaller_layout_the_processes_start_again_on_all_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.launch.nodes.roster.with_fewer", lambda *_, **__: None)
    cluster = Cluster(tmp_path, more=", lost: shrink")
    cluster.join(node("b"), node("c"))
    cluster.after(0.0)
    _ends_twice_at_one_step(cluster)
    assert ranks(cluster.started()) == {"a": [0, 1], "b": [2, 3], "c": [4, 5]} and not cluster.events("shrunk")


@pytest.mark.parametrize("out", [[0], []], ids=["a device", "no device"])
def test_what_fails_its_test_counts_and_not_what_ended_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: list[int]
) -> None:
    cluster = Cluster(tmp_path, more=", lost: shrink", overrides=["faults.restarts=3"])
    cluster.join(node("b"), node("c"))
    cluster.after(0.0)
    with monkeypatch.context() as patch:
        patch.setattr(Roster, "without", lambda *_: None)  # no layout fits then
        _ends_twice_at_one_step(cluster)
    cluster.started()
    failed = Failure(0, time.time(), "CannotRun", (Problem("the sum over all devices is wrong"),))
    for name, failure in (("a", failed), ("b", consequence(2)), ("c", consequence(4))):
        own = out if name == "a" else []
        cluster.says(name, "ended", result=None, failures=[asdict(failure)], gpu_faults=[], out=own)
    assert [event["without"] for event in cluster.events("shrunk")] == ([out] if out else [])
    assert isinstance(cluster.leader.outcome, CannotRun) == (not out)


def test_each_node_that_is_left_is_an_island(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, least=2, overrides=["parallel.sync.every=5"])
    cluster.join(node("b"), node("c"))
    cluster.after(0.0)
    whole = cluster.started()
    assert layout_of(cluster.leader.spec.loaded.job).islands == 3 and whole.nodes == 3
    cluster.leader.left("b", cluster.now)
    cluster.ended("a")
    cluster.ended("c")
    cluster.after(1.0)
    group = cluster.started()
    assert layout_of(cluster.leader.spec.loaded.job).islands == 2 and group.nodes == 2
    assert group.job is not None and group.job["parallel"]["sync"] == {"every": 5}


def test_a_node_without_which_the_layout_is_the_same_waits(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 4, least=1, most=3)
    cluster.join(node("b"))
    cluster.after(JOIN)
    cluster.started()
    cluster.pulses(dict.fromkeys(range(4), 2), done=5)
    cluster.join(node("c"))
    cluster.after(10 * SETTLED)
    assert not cluster.take("pause")


def test_processes_that_stop_anyway_are_not_stopped_for_a_new_node(tmp_path: Path) -> None:
    """They would leave their state in memory instead of saving it."""
    cluster = Cluster(tmp_path, least=2)
    cluster.join(node("b"))
    cluster.after(JOIN)
    cluster.started()
    cluster.pulses(dict.fromkeys(range(4), 2), done=5)
    cluster.says("b", "signals", numbers=[15])
    cluster.join(node("c"))
    cluster.after(SETTLED + 1)
    assert not cluster.take("pause")
