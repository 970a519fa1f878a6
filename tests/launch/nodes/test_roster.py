"""The layout on the nodes that are left: without a device, without a whole node, and planned for the devices there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from stoker.hardware.machines.cluster import Cluster
from stoker.hardware.machines.cluster_file import load_cluster
from stoker.job import load_job
from stoker.job.layout import layout_of
from stoker.job.load_job import with_nodes
from stoker.launch.auto_parallel import with_plan
from stoker.launch.nodes.group import Group, Node, assign_ranks
from stoker.launch.nodes.roster import Roster
from stoker.launch.run_spec import RunSpec

JOB = """
task: pretrain
model: llama-10m
data: rows.jsonl
steps: 2
train: {batch: 24, seq_len: 128}
"""


def gpus(count: int) -> Cluster:
    """A machine with L4s, as the driver of such a machine describes it."""
    return load_cluster(f"1x{count}xL4")


def spec_of(folder: Path, parallel: str, *, nodes: int) -> RunSpec:
    """A job for nodes with two GPUs each."""
    (folder / "job.yaml").write_text(f"{JOB}parallel: {parallel}\n")
    read = load_job(folder / "job.yaml")
    loaded = with_plan(read, cluster=gpus(2).with_nodes(nodes))
    return RunSpec(with_nodes(loaded, nodes), folder, folder / "run", read=read.document)


def roster_of(
    spec: RunSpec, names: str, *, spares: str = "", machine: Callable[[int], Cluster] = gpus
) -> tuple[Roster, Group]:
    """Nodes with two GPUs each; the first leads. The group is that of the whole job."""
    nodes = [Node(name, (name, 1), (0, 1), name in spares) for name in names + spares]
    roster = Roster(spec, nodes[0], most=len(names), nccl=True, now=0.0, machine=machine)
    for node in nodes[1:]:
        roster.add(node, 0.0)
    return roster, Group(1, assign_ranks(nodes[: len(names)], spec.layout.world))


def ranks(roster: Roster, group: Group, spec: RunSpec) -> dict[str, tuple[int, ...]]:
    """The devices of each node on which a job would run."""
    return {
        m.node.name: m.node.devices[: m.count] for m in assign_ranks(roster.candidates(group)[0], spec.layout.world)
    }


def test_a_device_that_is_left_out_is_used_no_more(tmp_path: Path) -> None:
    roster, group = roster_of(spec_of(tmp_path, "{data: 6}", nodes=3), "abc")
    fewer = roster.without([2], group)  # the first of b
    assert fewer is not None and fewer.layout.world == 4 and fewer.loaded.job.train.batch == 24
    assert ranks(roster, group, fewer) == {"a": (0, 1), "b": (1,), "c": (0,)}
    assert roster.nodes["b"].devices == (1,) and roster.nodes["c"].devices == (0, 1)


def test_a_device_of_a_node_that_has_left_is_not_missed(tmp_path: Path) -> None:
    roster, group = roster_of(spec_of(tmp_path, "{data: 6}", nodes=3), "abc")
    roster.remove("b")
    fewer = roster.without([3, 4], group)  # the second of b and the first of c
    assert fewer is not None and ranks(roster, group, fewer) == {"a": (0, 1), "c": (1,)}


def test_a_run_grows_when_new_nodes_have_settled_and_allow_more_processes(tmp_path: Path) -> None:
    roster, whole = roster_of(spec_of(tmp_path, "{data: 6}", nodes=3), "abc")
    smaller = Group(1, whole.members[:2])
    roster.add(Node("c", ("c", 1), (0, 1)), 10.0)
    assert not roster.can_grow(smaller, 11.0) and roster.can_grow(smaller, 13.5)
    roster.started()
    roster.add(Node("d", ("d", 1), (0, 1)), 20.0)
    assert not roster.can_grow(whole, 30.0)


def test_a_whole_node_is_left_out_and_islands_follow(tmp_path: Path) -> None:
    roster, group = roster_of(spec_of(tmp_path, "{data: 6, sync: {every: 5}}", nodes=3), "abc")
    fewer = roster.without([2, 3], group)
    assert fewer is not None and ranks(roster, group, fewer) == {"a": (0, 1), "c": (0, 1)}
    assert layout_of(fewer.loaded.job).islands == 2


def test_a_spare_takes_the_place_of_a_node_without_devices(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "{data: 6}", nodes=3)
    roster, group = roster_of(spec, "abc", spares="s")
    whole = roster.without([2, 3], group)
    assert whole is not None and roster.is_whole(whole)
    assert ranks(roster, group, whole) == {"a": (0, 1), "c": (0, 1), "s": (0, 1)}


def test_nothing_is_left_of_a_layout_that_needs_all(tmp_path: Path) -> None:
    roster, group = roster_of(spec_of(tmp_path, "{tensor: 2, pipeline: 2}", nodes=2), "ab")
    assert roster.without([0], group) is None


@pytest.mark.parametrize(
    ("lost", "nodes", "left"),
    [
        ([4, 5], (2, 2), {"a": (0, 1), "b": (0, 1)}),
        ([3], (1, 5), {"a": (0, 1), "b": (0,), "c": (0, 1)}),
    ],
)
def test_a_planned_job_is_planned_for_the_gpus_that_are_left(
    tmp_path: Path, lost: list[int], nodes: tuple[int, int], left: dict[str, tuple[int, ...]]
) -> None:
    asked: list[int] = []

    def machine(count: int) -> Cluster:
        asked.append(count)
        return gpus(count)

    spec = spec_of(tmp_path, "auto", nodes=3)
    assert spec.layout.world == 6
    roster, group = roster_of(spec, "abc", machine=machine)
    fewer = roster.without(lost, group)
    assert fewer is not None and ranks(roster, group, fewer) == left
    per_node, count = nodes
    again = load_job(tmp_path / "job.yaml", ["train.batch=24"])
    anew = with_plan(again, cluster=gpus(per_node).with_nodes(count))
    assert fewer.loaded.plan == anew.plan
    assert fewer.layout == layout_of(anew.job) and fewer.layout.world == per_node * count
    assert set(asked) == {per_node}


def test_what_the_planner_cannot_place_waits_for_more_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def nothing(*_: object, left: int, **__: object) -> None:
        asked.append(left)

    roster, group = roster_of(spec_of(tmp_path, "auto", nodes=3), "abc")
    monkeypatch.setattr("stoker.launch.nodes.roster.with_fewer", nothing)
    node = roster.nodes["c"]
    roster.remove("c")
    for _ in range(3):
        assert roster.candidates(group)[1] is None
    assert asked == [4]  # planning takes seconds, and the leader asks in every turn
    roster.add(node, 0.0)
    whole = roster.candidates(group)[1]
    assert whole is not None and roster.is_whole(whole)
    assert roster.without(range(6), group) is None and asked == [4]


def test_a_node_that_was_left_out_may_be_replaced_by_one_of_its_name_on_another_machine(tmp_path: Path) -> None:
    roster, _ = roster_of(spec_of(tmp_path, "{data: 6}", nodes=3), "abc")
    roster.leave_out([("b", "b")])
    assert roster.nodes["b"].devices == ()
    roster.add(Node("b", ("b", 1), (0, 1)), 1.0)
    assert roster.nodes["b"].devices == ()
    roster.add(Node("b", ("elsewhere", 1), (0, 1)), 2.0)
    assert roster.nodes["b"].devices == (0, 1)
