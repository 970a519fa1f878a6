"""What the leader decides: a state machine with a clock of the test's and nodes that only answer."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from stoker.errors import CannotRun, Problem, RunFailed, UserError
from stoker.job import load_job
from stoker.job.layout import layout_of
from stoker.job.load_job import with_nodes
from stoker.launch.first_failure import Failure, Interrupted
from stoker.launch.nodes.agent import message_of, pulses_of
from stoker.launch.nodes.group import Group, Member, Node, assign_ranks, select_training_nodes
from stoker.launch.nodes.leader import JOIN, REMIND, RETURN, Hands, Leader
from stoker.launch.nodes.node_supervisor import MANY, POLL, poll_interval
from stoker.launch.nodes.outcome import outcome_of, outcome_to_json
from stoker.launch.nodes.roster import SETTLED
from stoker.launch.nodes.running_start import STACKS
from stoker.launch.run_spec import RunResult, RunSpec
from stoker.resilience.heartbeat import Pulse
from stoker.runs.run_folder import RunFolder

JOB = """
task: module
module: {model: "torch.nn:Linear", loss: "torch.nn:MSELoss", data: "torch:ones"}
steps: 2
train: {batch: 24}
parallel: {data: %d}
faults: {restarts: 2, back_off: 1, hang: 10%s}
"""
RESULT = asdict(RunResult("done", 9, 10, None, 2.0, 1.0, None, None, None, None, True))


def node(name: str, devices: int = 2, *, spare: bool = False, job: str = "") -> Node:
    return Node(name, (f"10.0.0.{ord(name[0]) - 96}", 1), tuple(range(devices)), spare, job)


class Cluster:
    """A leader, and nodes that do what the test says."""

    def __init__(
        self,
        base: Path,
        world: int = 6,
        *,
        least: int = 3,
        most: int = 3,
        more: str = "",
        overrides: Sequence[str] = (),
        **rest: Any,
    ) -> None:
        (base / "job.yaml").write_text(JOB % (world, more))
        loaded = with_nodes(load_job(base / "job.yaml", overrides), most)
        self.spec = RunSpec(loaded, base, base / "run")
        self.spec.output.mkdir(exist_ok=True)
        self.now = 100.0
        self.sent: list[tuple[str, dict[str, Any]]] = []
        self.words: list[str] = []
        self.mark: str | None = ".group-x"
        self.released = 0
        hands = Hands(
            lambda name, message: self.sent.append((name, message)),
            self.words.append,
            lambda: self.mark,
            self._release,
            lambda first: (first.address[0], 7),
        )
        self.leader = Leader(
            self.spec, hands, me=rest.pop("me", node("a")), least=least, most=most, nccl=False, now=self.now, **rest
        )

    def _release(self) -> None:
        self.released += 1

    def join(self, *nodes: Node) -> None:
        for each in nodes:
            assert self.leader.joined(each, self.now) == ""

    def after(self, seconds: float) -> None:
        self.now += seconds
        self.leader.tick(self.now)

    def take(self, kind: str) -> dict[str, dict[str, Any]]:
        """The messages of a kind since the last look, by node."""
        found = {name: message for name, message in self.sent if message["kind"] == kind}
        self.sent = [(name, message) for name, message in self.sent if message["kind"] != kind]
        return found

    def started(self) -> Group:
        """The group of the start that has just been sent to all."""
        starts = self.take("start")
        assert starts.keys() == self.leader.nodes.keys()
        (group,) = {str(message): Group.of(message["group"]) for message in starts.values()}.values()
        return group

    def says(self, name: str, kind: str, **values: Any) -> None:
        self.leader.message(name, {"kind": kind, **values}, self.now)

    def ended(self, name: str, *failures: Failure, result: dict[str, Any] | None = None) -> None:
        self.says(name, "ended", result=result, failures=[asdict(failure) for failure in failures], out=[])

    def pulses(self, steps: dict[int, int], *, done: int, age: float = 0.0, phase: str = "train") -> None:
        """Heartbeats: the steps that ranks have done since the start."""
        for rank, count in steps.items():
            assert self.leader.group is not None
            name = self.leader.group.node_of(rank).node.name
            pulse = Pulse(self.now - age, phase, done + 1, done, count, 0.1 * count, 0.1, 0.0, 0.0)
            self.says(name, **message_of({rank: pulse}, self.now))

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in RunFolder(self.spec.output).read_events() if event["event"] == name]


def killed(rank: int) -> Failure:
    return Failure(rank, time.time(), "exit", (Problem("process 7 was killed by SIGKILL"),))


def consequence(rank: int) -> Failure:
    problem = Problem("RuntimeError: Connection closed by peer")
    return Failure(rank, time.time() - 60, "RuntimeError", (problem,), consequence=True)


def ranks(group: Group) -> dict[str, list[int]]:
    return {member.node.name: list(member.ranks) for member in group.members}


def fails_test(cluster: Cluster, group: Group, out: list[int]) -> None:
    """All processes end, since the node of these ranks does not pass its test."""
    bad = group.node_of(out[0]).node.name
    failed = Failure(out[0], time.time(), "CannotRun", (Problem(f"rank {out[0]} on {bad} does not pass its test"),))
    for member in group.members:
        name = member.node.name
        failure = failed if name == bad else consequence(member.first)
        cluster.says(name, "ended", result=None, failures=[asdict(failure)], out=out if name == bad else [])


@pytest.fixture
def three(tmp_path: Path) -> Cluster:
    """Three nodes that train."""
    cluster = Cluster(tmp_path)
    cluster.join(node("b"), node("c"))
    cluster.after(0.0)
    assert ranks(cluster.started()) == {"a": [0, 1], "b": [2, 3], "c": [4, 5]}
    return cluster


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


def test_a_bad_node_ends_the_run_where_too_few_are_left(three: Cluster) -> None:
    group = three.leader.group
    assert group is not None
    fails_test(three, group, [2, 3])
    assert isinstance(three.leader.outcome, CannotRun) and "b does not pass its test" in str(three.leader.outcome)
    assert not three.events("left_out") and three.leader.nodes["b"].devices == (0, 1)


@pytest.mark.parametrize("lost", ["replace", "shrink"])
def test_a_device_is_left_out_only_where_the_job_allows_it_and_a_layout_is_left(tmp_path: Path, lost: str) -> None:
    cluster = Cluster(tmp_path, 2, least=2, most=2, more=f", lost: {lost}", me=node("a", 1))
    cluster.join(node("b", 1))
    cluster.after(0.0)
    group = cluster.started()
    for member in group.members:
        out = [member.first] if lost == "shrink" or member.first else []
        cluster.says(member.node.name, "ended", result=None, failures=[asdict(killed(member.first))], out=out)
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
    assert ranks(cluster.started()) == {"a": [0, 1], "b": [2], "c": [3]}
    assert [event["without"] for event in cluster.events("shrunk")] == [[3]]
    assert cluster.leader.nodes["b"].devices == (0,)


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


def test_of_hung_processes_the_one_that_waits_for_no_other_is_named(three: Cluster) -> None:
    three.pulses(dict.fromkeys(range(6), 3), done=3)
    three.after(11.0)
    assert three.take("stacks").keys() == set("abc")
    for name, waits in (("a", [0, 1]), ("b", [2]), ("c", [4, 5])):
        three.says(name, "stacks", waits=waits, files=[f"stack-{name}.txt"], pids=[[3, 77]] if name == "b" else [])
    three.after(0.1)
    (hung,) = three.events("hung")
    assert (hung["rank"], hung["node"], hung["silent_ranks"]) == (3, "b", list(range(6)))
    assert three.take("end").keys() == set("abc")
    for name in "abc":
        three.ended(name)
    three.after(1.0)
    three.started()
    assert [(e["rank"], e["cause"]) for e in three.events("fault")] == [(3, "hung")]


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
    three.says("b", "signals", numbers=[15, 15])
    assert three.take("signal")["a"]["numbers"] == [15, 15]
    for name in "abc":
        three.ended(name)
    assert isinstance(three.leader.outcome, Interrupted) and three.leader.outcome.number == 15


def test_the_next_node_goes_on_from_what_the_lost_leader_had_told(three: Cluster, tmp_path: Path) -> None:
    three.pulses(dict.fromkeys(range(6), 3), done=3)
    three.says("b", "failing", killed=True)
    for name in "abc":
        three.ended(name, *([killed(3)] if name == "b" else []))
    three.after(2.0)
    group = three.started()
    after = Cluster(tmp_path, me=node("b"), group=group, lost=["a"])
    after.join(node("c"))
    after.after(RETURN)
    assert not after.sent and len(three.events("node_lost")) == 0  # three are needed: it may be the one that is cut off
    after.join(node("d"))
    after.after(0.0)
    again = after.started()
    assert again.generation == group.generation + 1 and ranks(again) == {"b": [0, 1], "c": [2, 3], "d": [4, 5]}
    assert again.policy == group.policy and again.policy["count"] == 1  # type: ignore[index]
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


def test_nodes_keep_their_order_and_spares_come_last() -> None:
    nodes = [node("s", spare=True), node("d"), node("b"), node("c")]
    assert [n.name for n in select_training_nodes(nodes, 3, before=["c", "b", "c"])] == ["c", "b", "d"]
    assert [(m.node.name, m.first, m.count) for m in assign_ranks([node("a", 3), node("b", 3)], 4)] == [
        ("a", 0, 3),
        ("b", 3, 1),
    ]


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


def test_processes_of_a_node_that_has_ended_do_not_hang(three: Cluster) -> None:
    three.pulses(dict.fromkeys(range(6), 3), done=3)
    three.ended("b", result=RESULT)
    three.after(11.0)
    three.after(STACKS)
    start = three.leader._start
    assert start is not None
    assert {hung.rank for hung in start.silent} == {0, 1, 4, 5}


def test_messages_of_many_nodes_are_taken_together() -> None:
    assert poll_interval(0) == poll_interval(MANY - 1) == 0.0
    assert 0.0 < poll_interval(MANY) < POLL < poll_interval(1000) == poll_interval(10_000)
