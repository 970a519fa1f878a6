"""Rows on servers against rows on the trainers; authentication and logs of servers."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from served_tables import (
    FEATURES,
    ITEMS,
    SECRET,
    STEPS,
    WORDS,
    on_a_rank,
    same,
    serving,
    step,
    trained,
    words,
)

from stoker.errors import DiskFailed, RunFailed, UserError
from stoker.frames import PeerRefused
from stoker.launch.process_pool import Pool
from stoker.sparse import DiskTier, JaggedIds, SparseEmbeddings
from stoker.sparse.servers import RowServers, server_connection
from stoker.sparse.servers.row_server import RowServer
from stoker.sparse.servers.served_rows import ServedRows
from stoker.sparse.servers.server_connection import ServerConnection
from stoker.sparse.servers.server_link import ServerLink
from stoker.sparse.servers.wire_format import dict_of, settings_of


def link_of(tables: SparseEmbeddings) -> ServerLink:
    [link] = source_of(tables)._links
    return link


def source_of(tables: SparseEmbeddings) -> ServedRows:
    source = tables._fused[0].source
    assert isinstance(source, ServedRows)
    return source


def test_one_trainer_gets_the_same_rows_to_the_bit(tmp_path: Path) -> None:
    losses, state = trained(None, range(STEPS), [])
    with serving(tmp_path / "a", tmp_path / "b") as (servers, _):
        served, part = trained(servers, range(STEPS), [])
    assert served == losses
    for name, table in state.tables.items():
        assert torch.equal(part.tables[name].ids, table.ids)  # ascending
        assert torch.equal(part.tables[name].values, table.values)
    same([part], [state])


@pytest.mark.parametrize("world", [2, 3])
def test_many_trainers_get_the_same_rows(world: int, pool: Pool, tmp_path: Path) -> None:
    losses, state = trained(None, range(STEPS), [])
    with serving(tmp_path / "a", tmp_path / "b") as (servers, _):
        ranks = pool.run(on_a_rank, servers, range(STEPS), [], world=world)
    assert [sum(parts) for parts in zip(*(losses for losses, _ in ranks), strict=True)] == pytest.approx(
        losses, rel=1e-12
    )
    same([part for _, part in ranks], [state], 1e-11)


def test_states_of_trainers_and_of_servers_are_the_same_kind(pool: Pool, tmp_path: Path) -> None:
    losses, _ = trained(None, range(STEPS), [])
    _, half = trained(None, range(4), [])
    with serving(tmp_path / "a", tmp_path / "b", tmp_path / "c") as (servers, _):
        ranks = pool.run(on_a_rank, servers, range(4, 6), [half], world=2)
    rest, _ = trained(None, range(6, STEPS), [part for _, part in ranks])
    assert rest == pytest.approx(losses[6:], rel=1e-12)


def test_a_step_that_cannot_be_written_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise DiskFailed("the disk is full")

    with serving(tmp_path / "a") as (servers, [server]):
        tables = words(replace(servers, patience=3))
        step(tables)
        monkeypatch.setattr(server._shards[0]._log, "append", full)
        with pytest.raises(RunFailed, match="cannot go on: the disk is full"):
            step(tables), step(tables)
        monkeypatch.undo()
        step(words(servers))  # a new run is served


def test_a_log_with_a_step_twice_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path / "a") as (servers, [server]):
        tables = words(servers)
        step(tables), step(tables)
        tables.state()
        log = server._shards[0]._log
        nothing = [np.empty(0, np.int64)] * 3 + [np.empty((0, 3))]
        log.append({"step": 1, "scale": 1.0, "lr_factor": 1.0}, nothing)
    with pytest.raises(UserError, match="the log has step 1 where step 2 was to come"):
        RowServer(("127.0.0.1", 0), SECRET, tmp_path / "a")


def test_no_step_is_taken_among_parts_of_a_state_and_one_may_give_them_up(tmp_path: Path) -> None:
    with serving(tmp_path / "a") as (servers, _):
        tables = words(servers)
        for _ in range(2):
            step(tables)
        parts = tables.parts(rows=2)
        first = next(parts)
        with pytest.raises(RuntimeError, match="is still sending parts of a state: read them first"):
            step(tables)
        parts.close()
        tables.discard()
        assert len(step(tables)) == 5
        again = list(tables.parts(rows=2))
        assert len(again) > 1 and len(first.tables["words"].ids) == 2


def test_without_the_secret_nothing_is_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(tmp_path / "a") as (servers, _), pytest.raises(RunFailed, match="its secret may differ"):
        trained(replace(servers, secret=bytes(32), patience=0.5), range(1), [])
    assert capsys.readouterr().err == "127.0.0.1 was refused: its secret differs\n"


def test_strangers_take_no_more_than_their_places(tmp_path: Path) -> None:
    with serving(tmp_path / "a") as (servers, [server]):
        tables = words(servers)
        step(tables)
        strangers = [socket.create_connection(servers.addresses[0]) for _ in range(70)]
        for stranger in strangers[:6]:  # 32 random bytes, and the end when others need the place
            stranger.settimeout(60)
            while stranger.recv(64):
                pass
        until = time.monotonic() + 60
        while len(server._strangers) < 64 and time.monotonic() < until:  # the last one is counted once a place is free
            time.sleep(0.01)
        assert len(server._strangers) == 64
        step(tables), step(tables)
        assert link_of(tables).losses == 0  # whoever has the secret is no stranger
        trained(servers, range(1), [])  # its connection takes the place of another stranger
        for stranger in strangers:
            stranger.close()


def test_a_stranger_that_sends_slowly_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_connection, "GREETING", 0.5)
    with serving(tmp_path / "a") as (servers, _), socket.create_connection(servers.addresses[0]) as stranger:
        begin = time.monotonic()
        with suppress(ConnectionError):  # once it is ended
            while time.monotonic() - begin < 15:
                stranger.sendall(b"x")
                time.sleep(0.3)  # 64 bytes take 19 seconds
        assert time.monotonic() - begin < 15


def test_a_server_that_is_not_there_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = free.getsockname()
    with pytest.raises(RunFailed, match=f":{address[1]} cannot"):
        trained(RowServers((address,), SECRET, patience=0.3), range(1), [])


def test_settings_survive_the_way() -> None:
    table = replace(ITEMS, disk=DiskTier(Path("x"), 5))
    found = settings_of(dict_of(table))
    assert replace(found, disk=None) == replace(table, disk=None)
    assert found.disk is not None
    assert found.disk.rows == 5


def test_messages_of_steps_that_were_made_are_not_kept(tmp_path: Path) -> None:
    with serving(tmp_path / "a") as (servers, _):
        tables = words(servers)
        for _ in range(5):
            step(tables)
        assert len(link_of(tables)._unmade) == 2  # of the last step


def test_gradients_of_all_lookups_of_a_step_are_summed_and_rows_counted_on_all_servers(tmp_path: Path) -> None:
    plain = SparseEmbeddings([WORDS], {"words": FEATURES["words"]}, seed=3)
    with serving(tmp_path / "a", tmp_path / "b") as (servers, _):
        served = words(servers)
        for tables in (plain, served):
            for _ in range(2):
                for ids in (torch.arange(5), torch.arange(3, 8)):  # the second lookup has ids of the first
                    tables({"words": JaggedIds.single(ids)})["words"].square().sum().backward()
                tables.apply_gradients()
        found, expected = served.state().tables["words"], plain.state().tables["words"]
        assert served.rows == plain.rows == {"words": 8}
    assert torch.equal(found.values, expected.values) and torch.equal(found.seen, expected.seen)


def test_a_server_writes_a_snapshot_in_time(tmp_path: Path) -> None:
    with serving(tmp_path / "a", every=3) as (servers, [server]):
        tables = words(servers)
        for _ in range(5):
            step(tables)
        tables.state()
        assert server._shards[0]._log.first == 3


def test_gradients_of_one_lookup_that_are_not_finite_are_enough(tmp_path: Path) -> None:
    ids = {"words": JaggedIds.single(torch.arange(5))}
    with serving(tmp_path / "a") as (servers, _):
        tables = words(servers)
        for factor in (1.0, torch.nan):
            (tables(ids)["words"].sum() * factor).backward()
        assert not tables.gradients_are_finite()
        tables.discard()


@contextmanager
def connected() -> Iterator[tuple[ServerConnection, ServerConnection]]:
    """Yields both sides of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as pool:
        dialled = pool.submit(ServerConnection.dial, listening.getsockname(), SECRET)
        accepted = ServerConnection(listening.accept()[0], SECRET, dialled=False)
        yield dialled.result(), accepted
        dialled.result().close(), accepted.close()


@pytest.mark.parametrize(
    ("forms", "parts"),
    [
        ([["<i8", [-1]]], []),
        ([["<i8", [1.5]]], []),
        ([["|O", [1]]], [bytes(8)]),
        ([["|i1", [2**60]]], []),
        ([["|i1", [0]]] * 1025, []),
        ([["|i1", [3]]], [bytes(5)]),
        ([["|i1", [3]]], [b""]),
        (7, []),
    ],
)
def test_a_message_with_arrays_of_another_form_is_refused(forms: object, parts: list[bytes]) -> None:
    with connected() as (one, other):
        for payload in (json.dumps({"kind": "values", "arrays": forms}).encode(), *parts):
            one._connection.sendall(one._seal.frame(payload))
        one.close()
        with pytest.raises(PeerRefused):
            other.receive()


def test_a_large_array_is_sent_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_connection, "LARGEST", 1000)
    with connected() as (one, other):
        one.send({"kind": "x"}, [np.arange(400), np.arange(3.0)])
        message, (first, second) = other.receive()
    assert message == {"kind": "x"} and np.array_equal(first, np.arange(400)) and np.array_equal(second, np.arange(3.0))
