"""What the leader decides: a state machine with a clock of the test's and nodes that only answer."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from simulated_nodes import RESULT, Cluster, consequence, killed, node, ranks

from stoker.errors import Interrupted, Problem, RunFailed, UserError
from stoker.launch.first_failure import Failure
from stoker.launch.nodes.agent import message_of
from stoker.launch.nodes.group import Group, Member
from stoker.launch.nodes.leader import JOIN, RETURN
from stoker.launch.nodes.outcome import outcome_of, outcome_to_json
from stoker.launch.nodes.running_start import LATER, STACKS
from stoker.launch.processes import GRACE
from stoker.resilience.heartbeat import Pulse
from stoker.train.run_result import RunResult


def test_all_nodes_are_waited_for(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    cluster.join(node("c"))
    cluster.after(10 * JOIN)
    assert not cluster.sent and any("waiting for 1 more node" in words for words in cluster.words)
    cluster.join(node("b"))
    cluster.after(0.0)
    group = cluster.started()
    assert ranks(group) == {"a": [0, 1], "c": [2, 3], "b": [4, 5]} and group.store == ("10.0.0.1", 7)
    assert group.generation == 1 and group.job is None


@pytest.mark.parametrize(
    ("count", "told"), [(0, ""), (3, "; not there yet: 10.0.0.2:1"), (6, "10.0.0.4:1, 10.0.0.5:1, ...")]
)
def test_addresses_without_a_node_are_named(tmp_path: Path, count: int, told: str) -> None:
    expected = [(f"10.0.0.{number}", 1) for number in range(1, count + 1)]
    cluster = Cluster(tmp_path, rendezvous=expected)
    cluster.join(node("c"))
    cluster.after(10 * JOIN)
    (words,) = [words for words in cluster.words if words.startswith("waiting for")]
    assert words.startswith("waiting for 1 more node; 2 are here") and words.endswith(told or "are here")


def test_its_own_node_starts_last(tmp_path: Path) -> None:
    """It obeys at once, and what fails there at once is told to nodes that have started."""
    cluster = Cluster(tmp_path)
    cluster.join(node("b"), node("c"))
    cluster.after(0.0)
    assert [name for name, message in cluster.sent if message["kind"] == "start"] == ["b", "c", "a"]


def test_with_the_least_number_others_get_a_while(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, least=2)
    cluster.join(node("b"))
    cluster.after(JOIN - 1)
    assert not cluster.sent
    cluster.after(1)
    group = cluster.started()
    assert ranks(group) == {"a": [0, 1], "b": [2, 3]} and group.job is not None
    assert group.job["parallel"]["data"] == 4 and group.job["train"]["batch"] == 24  # the batch stays


def test_a_node_with_another_job_is_refused(tmp_path: Path) -> None:
    assert "another job" in Cluster(tmp_path).leader.joined(node("b", job="x"), 0.0)


def test_the_end_is_that_of_rank_0_once_all_have_ended(three: Cluster) -> None:
    for name in "cb":
        three.ended(name, result={**RESULT, "step": 1})
    assert three.leader.outcome is None
    three.ended("a", result=RESULT)
    assert three.leader.outcome == RunResult(**RESULT) == outcome_of(outcome_to_json(RunResult(**RESULT)))


def test_a_killed_process_ends_all_and_all_start_again_after_a_back_off(three: Cluster) -> None:
    three.pulses(dict.fromkeys(range(6), 3), done=3)
    three.says("b", "failing", killed=True)
    assert three.take("end") == {name: {"kind": "end", "grace": 0.0} for name in "abc"}
    three.ended("a", consequence(0))
    three.ended("c", consequence(5))
    assert three.leader.outcome is None
    three.ended("b", killed(3))
    three.after(0.5)
    assert not three.take("start")
    three.after(0.6)
    assert ranks(three.started()) == {"a": [0, 1], "b": [2, 3], "c": [4, 5]}
    (fault,) = three.events("fault")
    assert (fault["rank"], fault["node"], fault["step"], fault["cause"], fault["restart"]) == (3, "b", 3, "exit", 1)
    three.now += 2.0
    three.pulses(dict.fromkeys(range(6), 1), done=4)
    (restarted,) = three.events("restarted")
    assert restarted["seconds"] == pytest.approx(3.1, abs=0.01)


def test_a_fault_that_comes_back_ends_the_run_with_its_reason(three: Cluster) -> None:
    for _ in range(3):
        three.says("b", "failing", killed=True)
        for name in "abc":
            three.ended(name, *([killed(3)] if name == "b" else []))
        three.after(10.0)
    assert isinstance(three.leader.outcome, RunFailed) and "rank 3: process 7 was killed" in str(three.leader.outcome)
    again = outcome_of(outcome_to_json(three.leader.outcome))
    assert type(again) is type(three.leader.outcome) and str(again) == str(three.leader.outcome)


def test_what_the_user_has_to_change_is_not_tried_again(three: Cluster) -> None:
    three.says("b", "failing", killed=False)
    assert three.take("end")["a"]["grace"] > 0  # the others may have the same to say
    wrong = Failure(2, time.time(), "UserError", (Problem("no such thing", "write another", key="train.lr"),))
    for name in "abc":
        three.ended(name, *([wrong] if name == "b" else [consequence(0)]))
    assert type(three.leader.outcome) is UserError and "no such thing" in str(three.leader.outcome)


def test_of_hung_processes_the_one_that_waits_for_no_other_is_named(three: Cluster) -> None:
    three.pulses(dict.fromkeys(range(6), 3), done=3)
    three.after(11.0)
    assert three.take("stacks").keys() == set("abc")
    for name, waits in (("a", [0, 1]), ("b", [2]), ("c", [4, 5])):
        three.says(name, "stacks", waits=waits, files=[f"stack-{name}.txt"], pids=[[3, 77]] if name == "b" else [])
    three.after(LATER)
    (hung,) = three.events("hung")
    assert (hung["rank"], hung["node"], hung["silent_ranks"]) == (3, "b", list(range(6)))
    assert three.take("end").keys() == set("abc")
    for name in "abc":
        three.ended(name)
    three.after(1.0)
    three.started()
    assert [(e["rank"], e["cause"]) for e in three.events("fault")] == [(3, "hung")]


def test_a_hung_process_that_spoke_after_those_that_wait_for_it_is_named(three: Cluster) -> None:
    three.pulses(dict.fromkeys((0, 1, 2, 4, 5), 3), done=3)
    three.after(0.5)
    three.pulses({3: 3}, done=3)
    while not three.take("stacks"):
        three.after(0.1)
    for name, waits in (("a", [0, 1]), ("b", [2]), ("c", [4, 5])):
        three.says(name, "stacks", waits=waits, files=[], pids=[])
    three.after(LATER)
    (hung,) = three.events("hung")
    assert (hung["rank"], hung["silent_ranks"]) == (3, list(range(6)))


def test_stacks_that_do_not_come_are_not_waited_for(three: Cluster) -> None:
    three.pulses(dict.fromkeys(range(6), 3), done=3)
    three.after(11.0)
    three.after(STACKS)
    assert three.take("end").keys() == set("abc")


def test_a_straggler_on_another_node_is_named(three: Cluster) -> None:
    for steps in (1, 30):
        for rank in range(6):
            own = steps * (0.4 if rank == 4 else 0.1)
            pulse = Pulse(three.now, "train", steps + 1, steps, steps, own, 0.1, 0.0, 0.0)
            name = three.leader.group.node_of(rank).node.name  # type: ignore[union-attr]
            three.says(name, **message_of({rank: pulse}, three.now))
        three.after(0.2)
    assert [event["rank"] for event in three.events("slow")] == [4]


def test_a_signal_that_every_node_gets_counts_once(three: Cluster) -> None:
    for name in "bca":
        three.says(name, "signals", numbers=[15])
    assert [message["numbers"] for _, message in three.sent if message["kind"] == "signal"] == [[15]] * 3
    three.says("b", "failing", killed=True)
    assert three.take("end")["a"]["grace"] == GRACE  # the others still save
    three.says("b", "signals", numbers=[15, 15])
    assert three.take("signal")["a"]["numbers"] == [15, 15]
    for name in "abc":
        three.ended(name)
    assert isinstance(three.leader.outcome, Interrupted) and three.leader.outcome.number == 15
    assert not three.leader.outcome.keeps  # the second signal asks for an end without a checkpoint


def test_a_signal_before_the_start_keeps_what_is_in_memory(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    cluster.says("a", "signals", numbers=[2])
    cluster.after(0.0)
    assert isinstance(cluster.leader.outcome, Interrupted) and cluster.leader.outcome.keeps


def test_a_node_that_leaves_after_its_end_is_not_lost(three: Cluster) -> None:
    three.ended("b", result=RESULT)
    three.leader.left("b", three.now)
    for name in "ca":
        three.ended(name, result=RESULT)
    assert three.leader.outcome == RunResult(**RESULT) and not three.events("node_lost")


def test_an_error_for_the_user_is_told_though_a_node_is_lost_at_the_same_time(three: Cluster) -> None:
    three.leader.left("c", three.now)
    three.ended("a", consequence(0))
    three.ended("b", Failure(2, time.time(), "UserError", (Problem("no such thing"),)))
    assert type(three.leader.outcome) is UserError and "no such thing" in str(three.leader.outcome)


def test_the_next_node_goes_on_from_what_the_lost_leader_had_told(three: Cluster, tmp_path: Path) -> None:
    three.pulses(dict.fromkeys(range(6), 3), done=3)
    for evaluate in (40.0, 5.0):  # seconds of the longest evaluation of a process
        pulse = Pulse(three.now, "train", 4, 3, 3, 0.3, 0.1, evaluate, 0.0)
        three.says("b", **message_of({2: pulse}, three.now))
    three.says("b", "failing", killed=True)
    for name in "abc":
        three.ended(name, *([killed(3)] if name == "b" else []))
    three.after(2.0)
    group = three.started()
    assert group.longest is not None and group.longest["evaluate"] == 40.0
    after = Cluster(tmp_path, me=node("b"), group=group, lost=["a"])
    after.join(node("c"))
    after.after(RETURN)
    assert not after.sent and len(three.events("node_lost")) == 0  # three are needed: it may be the one that is cut off
    after.join(node("d"))
    after.after(0.0)
    again = after.started()
    assert again.generation == group.generation + 1 and ranks(again) == {"b": [0, 1], "c": [2, 3], "d": [4, 5]}
    assert again.policy == group.policy and again.policy["count"] == 1  # type: ignore[index]
    assert again.longest == group.longest  # its watch waits as long
    assert [event["node"] for event in after.events("node_lost")] == ["a"]


def test_a_new_leader_waits_a_while_for_the_others_of_the_group(three: Cluster, tmp_path: Path) -> None:
    members = tuple(Member(node(name), 2 * at, 2) for at, name in enumerate("abc"))
    after = Cluster(tmp_path, least=1, me=node("b"), group=Group(4, members), lost=["a"])
    after.after(RETURN - 1)
    assert not after.sent
    after.join(node("c"))
    after.after(0.0)
    assert ranks(after.started()) == {"b": [0, 1], "c": [2, 3]}


def test_the_folder_that_the_lost_leader_still_holds_is_waited_for(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 2, least=1, most=1)
    cluster.mark = None
    cluster.after(0.0)
    assert not cluster.sent
    cluster.mark = ".group-y"
    cluster.after(0.1)
    assert cluster.started().mark == ".group-y"


def test_processes_of_a_node_that_has_ended_do_not_hang(three: Cluster) -> None:
    three.pulses(dict.fromkeys(range(6), 3), done=3)
    three.ended("b", result=RESULT)
    three.after(11.0)
    three.after(STACKS)
    start = three.leader._start
    assert start is not None
    assert {hung.rank for hung in start.silent} == {0, 1, 4, 5}


def test_a_node_that_is_lost_before_its_end_is_no_success_of_the_others(three: Cluster) -> None:
    for name in "ca":
        three.ended(name, result=RESULT)
    three.leader.left("b", three.now)
    assert three.leader.outcome is None and [event["node"] for event in three.events("node_lost")] == ["b"]


def test_only_processes_that_still_run_are_ended(three: Cluster) -> None:
    three.ended("b", killed(3))
    three.says("c", "failing", killed=True)
    assert three.take("end").keys() == {"a", "c"}


def test_a_node_without_ranks_ends_nothing(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    cluster.join(node("b"), node("c"), node("s", spare=True))
    cluster.after(0.0)
    cluster.says("s", "failing", killed=True)
    assert not cluster.take("end")
    cluster.says("b", "failing", killed=True)
    assert cluster.take("end").keys() == set("abc")
