"""Copies of ranks on another node: whole, the newest, and of no other generation."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from stoker.launch.nodes import neighbour_copies, stream
from stoker.launch.nodes.channel import PeerNetwork, Said
from stoker.launch.nodes.group import Node
from stoker.launch.nodes.neighbour_copies import PIECE, Keeper, Sender
from stoker.launch.nodes.stream import Stream
from stoker.runs.run_folder import RunFolder
from stoker.runs.shm_folder import NEIGHBOUR, SENT, stamp_of

SECRET = bytes(32)
HOST = "127.0.0.1"


class Pair:
    """A node that sends the copies of ranks 2 and 3, and the next one, which keeps them."""

    def __init__(self, base: Path) -> None:
        self.run = RunFolder(base / "run")
        self.here, self.there = base / "here", base / "there"
        for folder in (self.run.path, self.here, self.there):
            folder.mkdir()
        self.network = PeerNetwork((HOST, 0), SECRET)
        self.generation = 1
        self.keeper = Keeper(lambda: (self.there, self.generation))
        self.sender: Sender | None = None

    def begin(self, generation: int = 1) -> None:
        node = Node("b", self.network.address, (0, 1))
        rest = {"source": HOST, "secret": SECRET, "output": self.run.path, "name": "a", "kept": (0, 1)}
        self.sender = Sender(self.here, (2, 3), node, generation=generation, **rest)  # type: ignore[arg-type]

    def until(self, what: Callable[[], bool], seconds: float = 20.0) -> None:
        deadline = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < deadline
            for happening in self.network.poll(0.02):
                if isinstance(happening, Said):
                    self.keeper.receive(*self.network.detach(happening.peer), happening.message)

    def copy(self, rank: int, slot: int, data: bytes, step: int) -> None:
        """A copy as a process makes it: the header comes last."""
        folder = self.here / f"rank-{rank}"
        folder.mkdir(exist_ok=True)
        header = folder / f"slot-{slot}.json"
        header.unlink(missing_ok=True)
        (folder / f"slot-{slot}").write_bytes(data)
        header.write_text(json.dumps({"step": step}))

    def is_kept(self, rank: int, slot: int, data: bytes) -> bool:
        path = self.there / f"rank-{rank}" / f"slot-{slot}"
        return path.with_suffix(".json").exists() and path.read_bytes() == data

    def is_sent(self, rank: int, slot: int) -> bool:
        path = self.here / f"{SENT}{rank}"
        return path.exists() and path.read_text() == stamp_of(self.here / f"rank-{rank}" / f"slot-{slot}.json")

    def end(self) -> None:
        if self.sender is not None:
            self.sender.close()
        self.keeper.close()
        self.network.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    made.end()


def test_copies_arrive_and_are_confirmed(pair: Pair) -> None:
    data = {rank: os.urandom(2 * PIECE + 17) for rank in (2, 3)}
    pair.begin()
    assert (pair.here / NEIGHBOUR).exists()
    for rank in (2, 3):
        pair.copy(rank, 0, data[rank], 5)
    pair.until(lambda: all(pair.is_kept(rank, 0, data[rank]) and pair.is_sent(rank, 0) for rank in (2, 3)))
    pair.copy(2, 1, b"next", 6)
    pair.until(lambda: pair.is_kept(2, 1, b"next") and pair.is_sent(2, 1))
    assert pair.is_kept(2, 0, data[2])  # the one before stays
    (event,) = [e for e in pair.run.read_events() if e["event"] == "neighbour_copies"]
    assert (event["node"], event["to"], event["bytes"]) == ("a", "b", 2 * (2 * PIECE + 17)) and event["mb_s"] > 0


def test_copies_are_sent_after_the_clock_was_set_back(pair: Pair) -> None:
    pair.begin()
    for step in range(4):
        pair.copy(2, step % 2, b"%d" % step, step)
        hour = time.time() - 3600 * (step >= 2) + step
        os.utime(pair.here / "rank-2" / f"slot-{step % 2}.json", (hour, hour))
        pair.until(lambda: pair.is_kept(2, step % 2, b"%d" % step) and pair.is_sent(2, step % 2))  # noqa: B023


def test_the_copy_before_is_sent_where_the_newest_one_was_removed(pair: Pair) -> None:
    pair.copy(2, 0, b"first", 5)
    pair.copy(2, 1, b"second", 6)
    pair.begin()
    pair.until(lambda: pair.is_sent(2, 1))
    assert not pair.is_kept(2, 0, b"first")
    for name in ("slot-1.json", "slot-1"):
        (pair.here / "rank-2" / name).unlink()
    pair.until(lambda: pair.is_sent(2, 0) and pair.is_kept(2, 0, b"first"))


def test_copies_of_former_ranks_are_removed_once_all_nodes_have_copies_of_this_start(pair: Pair) -> None:
    for rank in (0, 1, 2, 3, 4, 5):
        pair.copy(rank, 0, b"before", 4)
    pair.begin()
    for step in (5, 6):  # the second step is copied once the first is on all nodes
        assert (pair.here / "rank-4").exists()
        for rank in (2, 3):
            pair.copy(rank, step % 2, b"data", step)
        pair.until(lambda: all(pair.is_sent(rank, step % 2) for rank in (2, 3)))  # noqa: B023
    pair.until(lambda: sorted(path.name[-1] for path in pair.here.glob("rank-*")) == ["0", "1", "2", "3"])


def test_a_sender_of_another_generation_is_not_heard(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbour_copies, "AGAIN", 0.05)
    monkeypatch.setattr(neighbour_copies, "TRIES", 4)
    pair.copy(2, 0, b"old", 5)
    pair.begin(generation=7)
    pair.until(lambda: not (pair.here / NEIGHBOUR).exists())  # given up: the processes wait for nothing
    assert not list(pair.there.iterdir())
    assert [e["event"] for e in pair.run.read_events()] == ["neighbour_copies_failed"]


def test_without_memory_on_the_next_node_training_goes_on(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbour_copies, "AGAIN", 0.05)
    monkeypatch.setattr(neighbour_copies, "TRIES", 2)
    monkeypatch.setattr(neighbour_copies, "SPARE", 1e18)
    pair.copy(2, 0, b"data", 5)
    pair.begin()
    pair.until(lambda: not (pair.here / NEIGHBOUR).exists())
    (event,) = pair.run.read_events()
    assert "it has no memory for them" in event["why"] and not pair.is_kept(2, 0, b"data")


def test_what_arrived_in_part_does_not_count(pair: Pair) -> None:
    pair.copy(2, 0, b"first", 5)
    pair.begin()
    pair.until(lambda: pair.is_sent(2, 0))
    pair.keeper.close()
    assert pair.is_kept(2, 0, b"first") and not list(pair.there.glob("rank-*/*.arriving"))


def test_long_pauses_between_copies_and_many_lost_connections_do_not_end_them(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "WAIT", 0.2)
    monkeypatch.setattr(neighbour_copies, "AGAIN", 0.05)
    monkeypatch.setattr(neighbour_copies, "TRIES", 3)
    pair.begin()
    for step in range(5):
        pair.keeper.close()
        pair.copy(2, 0, b"%d" % step, step)
        pair.until(lambda: pair.is_sent(2, 0))
    time.sleep(0.5)
    pair.copy(2, 1, b"late", 9)
    deadline = time.monotonic() + 20
    while not pair.is_sent(2, 1):  # over the same connection: none is accepted here
        assert (pair.here / NEIGHBOUR).exists() and time.monotonic() < deadline
        time.sleep(0.02)


def given(pair: Pair, *pieces: bytes, size: int, whole: bool) -> None:
    """Another sender gives a copy of rank 2, and is heard to its end."""

    def send() -> None:
        hello = {"generation": 1, "from": "a"}
        with suppress(OSError), Stream.dial(pair.network.address, SECRET, source=HOST, hello=hello) as stream:
            stream.say({"rank": 2, "slot": "slot-0", "size": size, "header": '{"step": 5}'})
            assert stream.hear() == {"room": True}
            for piece in pieces:
                stream.send(piece)
            stream.say({"whole": whole})
            stream.hear()

    thread = threading.Thread(target=send)
    thread.start()
    pair.until(lambda: not thread.is_alive())
    thread.join()


def test_a_copy_that_its_process_replaced_meanwhile_or_of_another_size_is_not_kept(pair: Pair) -> None:
    given(pair, b"data", size=4, whole=True)
    assert pair.is_kept(2, 0, b"data")
    for pieces, size, whole in (([b"more"], 4, False), ([b"dat"], 4, True), ([b"data!"], 4, True)):
        given(pair, *pieces, size=size, whole=whole)
        assert pair.is_kept(2, 0, b"data") and not list(pair.there.glob("rank-*/*.arriving"))


def test_a_copy_that_is_replaced_while_it_is_sent_is_sent_again(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    read, changed = os.pread, []

    def reading(descriptor: int, size: int, at: int) -> bytes:
        if not changed:
            changed.append(True)
            pair.copy(2, 0, b"new!", 6)
        return read(descriptor, size, at)

    say, wholes, noted = Stream.say, [], []

    def saying(stream: Stream, message: dict[str, Any]) -> None:
        wholes.extend([message["whole"]] if "whole" in message else [])
        say(stream, message)

    monkeypatch.setattr(neighbour_copies.os, "pread", reading)
    monkeypatch.setattr(Stream, "say", saying)
    monkeypatch.setattr(Sender, "_note", lambda *values: noted.append(values))
    pair.copy(2, 0, b"old!", 5)
    pair.begin()
    pair.until(lambda: pair.is_sent(2, 0))
    assert changed and pair.is_kept(2, 0, b"new!")
    assert wholes == [False, True] and len(noted) == 1  # the first does not count as sent
