"""What a supervisor answers to other nodes: who may join, whose messages count, and which of two leaders gives way."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stoker.errors import Interrupted, UserError
from stoker.job import load_job
from stoker.job.load_job import with_nodes
from stoker.launch.nodes.channel import Address, PeerNetwork
from stoker.launch.nodes.find_leader import GroupReply
from stoker.launch.nodes.group import Group, Node, assign_ranks
from stoker.launch.nodes.node_supervisor import REFUSALS, NodeSupervisor
from stoker.launch.nodes.place import Place
from stoker.launch.run_spec import RunSpec
from stoker.runs.shm_folder import set_node_name

JOB = """
task: module
module: {model: "torch.nn:Linear", loss: "torch.nn:MSELoss", data: "torch:ones"}
steps: 2
train: {batch: 4}
parallel: {data: 2}
"""
SECRET = bytes(32)


class Other:
    """A connection to another node, which keeps what is sent."""

    def __init__(self, host: str = "10.0.0.2", port: int = 1) -> None:
        self.address: Address = (host, port)
        self.name, self.is_up, self.is_over = "", True, False
        self.said: list[dict[str, Any]] = []

    def send(self, message: dict[str, Any]) -> None:
        self.said.append(message)

    def kinds(self) -> list[str]:
        return [message["kind"] for message in self.said]


class Lab:
    """The supervisor of node a, whose connections the test makes."""

    def __init__(self, base: Path) -> None:
        (base / "job.yaml").write_text(JOB)
        spec = RunSpec(with_nodes(load_job(base / "job.yaml"), 2), base, base / "run")
        self.network = PeerNetwork(("127.0.0.1", 0), SECRET)
        self.address = self.network.address
        self.closed: list[Any] = []
        self.dialled: list[Address] = []
        self.network.close_peer = self.closed.append  # type: ignore[method-assign]
        self.network.dial = self._dial  # type: ignore[method-assign]
        self.node = Node("a", self.address, (0,))
        self.asked: list[int] = []
        place = Place(self.node, (self.address, ("10.0.0.2", 1)), 2, 2, SECRET)
        cache: Any = SimpleNamespace(close=lambda: None, served=0)
        take = lambda: nullcontext(True)  # noqa: E731
        self.supervisor: Any = NodeSupervisor(
            spec, place, self.network, asked=self.asked, take=take, say=lambda _: None, nccl=False, cache=cache
        )

    def _dial(self, address: Address) -> Any:
        self.dialled.append(address)
        return Other(*address)

    def hear(self, peer: Other, kind: str, **values: Any) -> None:
        self.supervisor._hear(peer, {"kind": kind, **values}, time.monotonic())

    def join(self, peer: Other, name: str) -> None:
        self.hear(peer, "join", node=Node(name, peer.address, (0,)).plain())

    def lead(self) -> None:
        self.supervisor._lead(time.monotonic())


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    made = Lab(tmp_path)
    yield made
    made.network.close()
    set_node_name("")


def test_a_leader_takes_nodes_in_each_under_its_own_name(lab: Lab) -> None:
    early, b, same, other = Other(), Other(), Other(), Other("10.0.0.3")
    lab.join(early, "b")
    assert early.kinds() == ["elsewhere"]  # it does not lead yet
    lab.lead()
    lab.join(b, "b")
    assert b.kinds() == ["joined"] and lab.supervisor._leader.nodes.keys() == {"a", "b"}
    lab.supervisor._signs.received(b, time.monotonic())
    lab.join(other, "b")
    lab.join(other, "a")
    assert other.kinds() == ["refused"] * 2 and "another node is named b" in other.said[0]["why"]
    assert lab.supervisor._members["b"] is b
    lab.join(same, "b")  # from the same host: it was restarted
    assert same.kinds() == ["joined"] and lab.supervisor._members["b"] is same and lab.closed == [b]
    lab.supervisor._went_down(b, time.monotonic(), refused=False)  # its connection ends later
    assert lab.supervisor._leader.nodes.keys() == {"a", "b"}
    lab.supervisor._went_down(same, time.monotonic(), refused=False)
    assert lab.supervisor._leader.nodes.keys() == {"a"}


def test_a_silent_node_gives_way_to_another_of_its_name(lab: Lab) -> None:
    lab.lead()
    b, other = Other(), Other("10.0.0.3")
    lab.join(b, "b")
    lab.supervisor._signs.received(b, time.monotonic() - 60)
    lab.join(other, "b")
    assert other.kinds() == ["joined"]


def test_only_members_are_heard_and_only_the_leader_is_obeyed(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    done: list[str] = []
    stranger, b = Other("10.0.0.9"), Other()
    monkeypatch.setattr(lab.supervisor._part, "do", lambda message, _: done.append(message["kind"]))
    lab.hear(stranger, "start", group={})
    lab.hear(stranger, "over", signal=15)
    assert not done and lab.supervisor._outcome is None
    lab.supervisor._upward = leader = Other("10.0.0.1")
    lab.hear(leader, "joined", group=None)
    lab.hear(leader, "pause")
    assert done == ["pause"]
    lab.supervisor._upward = None
    lab.lead()
    lab.join(b, "b")
    monkeypatch.setattr(lab.supervisor._leader, "message", lambda name, *_: heard.append(name))
    for peer in (stranger, b):
        lab.hear(peer, "signals", numbers=[15])
    stranger.name = "b"
    lab.hear(stranger, "signals", numbers=[15])
    assert heard == ["b"]


@pytest.mark.parametrize(
    ("reply", "yields"),
    [
        ((5, 1), True),  # its processes started later
        ((4, 3), True),  # it has more nodes
        ((4, 1), False),
        ((0, 3), False),
    ],
)
def test_of_two_leaders_the_one_with_the_older_group_gives_way(lab: Lab, reply: tuple[int, int], yields: bool) -> None:
    lab.supervisor._part.group = Group(4, assign_ranks([lab.node, Node("b", ("10.0.0.2", 1), (0,))], 2))
    lab.lead()
    b = Other()
    lab.join(b, "b")
    lab.supervisor._questions.probe([("10.0.0.9", 1)], [], time.monotonic())
    (asked,) = lab.supervisor._questions._asked
    there = ("10.0.0.9", 1)
    lab.hear(asked, "answer", **GroupReply(there, reply[0], reply[1]).plain())
    assert (lab.supervisor._leader is None) == yields
    if yields:
        assert b.kinds() == ["joined", "elsewhere"] and lab.dialled[-1] == there and not lab.supervisor._members


def test_a_leader_does_not_give_way_to_itself_or_to_a_node_without_a_leader(lab: Lab) -> None:
    lab.lead()
    for reply in (GroupReply(None, 9, 9), GroupReply(lab.address, 9, 9)):
        lab.supervisor._questions.probe([("10.0.0.9", 1)], [], time.monotonic())
        (asked,) = lab.supervisor._questions._asked
        lab.hear(asked, "answer", **reply.plain())
        assert lab.supervisor._leader is not None
    lab.hear(Other(), "answer", **GroupReply(("10.0.0.9", 1), 9, 9).plain())  # it was not asked
    assert lab.supervisor._leader is not None


def test_refusals_in_a_row_before_any_group_are_taken_for_another_secret(lab: Lab) -> None:
    peer = Other()
    for _ in range(REFUSALS - 1):
        lab.supervisor._went_down(peer, 0.0, refused=True)
    assert lab.supervisor._outcome is None
    lab.supervisor._came_up(Other(), 0.0)  # another node has the secret
    for _ in range(REFUSALS - 1):
        lab.supervisor._went_down(peer, 0.0, refused=True)
    assert lab.supervisor._outcome is None
    lab.supervisor._went_down(peer, 0.0, refused=True)
    outcome = lab.supervisor._outcome
    assert isinstance(outcome, UserError) and "another secret than node a" in str(outcome)


def test_refusals_do_not_end_a_node_that_has_a_group(lab: Lab) -> None:
    lab.supervisor._part.group = Group(1, assign_ranks([lab.node], 1))
    for _ in range(2 * REFUSALS):
        lab.supervisor._went_down(Other(), 0.0, refused=True)
    assert lab.supervisor._outcome is None


def test_a_signal_goes_to_the_leader_once_or_ends_a_node_without_one(lab: Lab) -> None:
    lab.supervisor._upward = leader = Other("10.0.0.1")
    lab.hear(leader, "joined", group=None)
    lab.asked.append(15)
    for _ in range(2):
        lab.supervisor._pass_signals(0.0)
    assert [message["numbers"] for message in leader.said] == [[15]] and lab.supervisor._outcome is None
    lab.supervisor._upward = again = Other("10.0.0.2")
    lab.hear(again, "joined", group=None)  # the next leader does not know of it
    lab.supervisor._pass_signals(0.0)
    assert [message["numbers"] for message in again.said] == [[15]]
    lab.supervisor._upward = None
    lab.asked.append(15)
    lab.supervisor._pass_signals(0.0)
    assert isinstance(lab.supervisor._outcome, Interrupted) and lab.supervisor._outcome.number == 15
