"""A node's part in a group: where the store is opened, and what is left in shared memory."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from stoker.errors import DiskFailed
from stoker.job import load_job
from stoker.launch.nodes.agent import Agent
from stoker.launch.nodes.folder_hold import FolderHold
from stoker.launch.nodes.group import Group, Node, assign_ranks
from stoker.launch.nodes.node_part import NodePart
from stoker.launch.nodes.place import Place
from stoker.launch.run_spec import RunSpec
from stoker.runs.kept_copies import is_kept
from stoker.runs.run_folder import RunFolder
from stoker.runs.shared_memory import shared_memory
from stoker.runs.shm_folder import CUT, KEPT, shared_folder

JOB = """
task: module
module: {model: "torch.nn:Linear", loss: "torch.nn:MSELoss", data: "torch:ones"}
steps: 2
train: {batch: 4}
"""
HERE, THERE = Node("a", ("127.0.0.1", 1), (0,)), Node("b", ("127.0.0.2", 1), (0,))


class Idle:
    """An agent without processes, and a folder that every node sees."""

    sees, started = True, 0

    def start(self, *_: object) -> None:
        self.started += 1

    def abandon(self) -> None: ...
    def end(self, _: float) -> None: ...
    def look(self, _: float) -> None: ...

    def is_seen(self, *_: object, **__: object) -> bool:
        return self.sees


@pytest.fixture
def idle() -> Idle:
    return Idle()


@pytest.fixture
def told() -> list[Any]:
    """What the node tells its leader."""
    return []


@pytest.fixture
def part(tmp_path: Path, idle: Any, told: list[Any]) -> Iterator[NodePart]:
    (tmp_path / "job.yaml").write_text(JOB)
    spec = RunSpec(load_job(tmp_path / "job.yaml"), tmp_path, tmp_path / "run")
    spec.output.mkdir()
    rest: dict[str, Any] = {"address": "127.0.0.1", "tell": told.append, "say": lambda _: None}
    yield NodePart(spec, Place(HERE, (), 1, 2, bytes(32)), cast(FolderHold, idle), cast(Agent, idle), **rest)
    with shared_memory(spec.output):  # removes what was kept
        (shared_folder(spec.output) / KEPT).unlink(missing_ok=True)


def test_the_store_is_opened_on_the_node_of_rank_0(part: NodePart) -> None:
    address = part.open_store(HERE)
    with pytest.raises(OSError), socket.create_server(address):
        pass
    host, port = part.open_store(THERE)
    assert host == "127.0.0.2"
    socket.create_server(("127.0.0.1", port)).close()  # nothing holds it here


def test_a_state_that_cannot_be_written_stays_in_memory(part: NodePart, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.event("started")
    with pytest.raises(DiskFailed, match="Step 7 is kept in this machine's memory"), part:
        part.do({"kind": "start", "group": Group(1, assign_ranks([HERE], 1)).plain()}, 0.0)
        copies = shared_folder(run.path) / "rank-0"
        copies.mkdir()
        (copies / "slot-0.json").write_text('{"step": 7}')
        raise DiskFailed("the disk is full")
    assert is_kept(run.path)


def test_a_start_that_is_ended_before_the_folder_is_seen_does_not_happen(
    part: NodePart, idle: Idle, told: list[Any]
) -> None:
    """The leader waits for the end of every node; the processes would train beside the next start."""
    idle.sees = False
    with part:
        part.do({"kind": "start", "group": Group(1, assign_ranks([HERE], 1)).plain()}, 0.0)
        assert not idle.started and not told
        part.do({"kind": "end", "grace": 0.0}, 1.0)
        assert [(message["kind"], message["result"]) for message in told] == [("ended", None)]
        idle.sees = True
        part.turn(2.0)
        assert not idle.started
        part.do({"kind": "start", "group": Group(2, assign_ranks([HERE], 1)).plain()}, 3.0)
        assert idle.started == 1
        part.do({"kind": "start", "group": Group(3, assign_ranks([THERE], 1)).plain()}, 4.0)  # without this node
        assert idle.started == 1 and part.generation == 3


def test_a_node_is_cut_off_once(part: NodePart, tmp_path: Path) -> None:
    with part:
        part.do({"kind": "start", "group": Group(1, assign_ranks([HERE], 1)).plain()}, 0.0)
        assert part.asked_cut() is None
        (shared_folder(tmp_path / "run") / CUT).write_text("2.5")
        assert part.asked_cut() == 2.5 and part.asked_cut() is None
