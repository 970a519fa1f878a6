"""Rows on servers against rows that the trainers hold; servers that are killed, and what they find when they return."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from stoker.errors import DiskFailed, RunFailed, UserError
from stoker.launch.process_pool import Pool
from stoker.sparse import Admission, DiskTier, Eviction, Feature, JaggedIds, SparseEmbeddings, TableSettings
from stoker.sparse.servers import RowServers
from stoker.sparse.servers.row_server import RowServer, dict_of, settings_of
from stoker.sparse.servers.server_connection import LOST, ServerConnection
from stoker.sparse.sparse_state import SparseState

pytestmark = pytest.mark.usefixtures("warm_processes")

SECRET, STEPS, BATCH = bytes(range(32)), 8, 12
ADMISSION = Admission(count=2, probability=0.9, cells=2**14)
USERS = TableSettings("users", 4, optimizer="adam", dtype="float64", init_scale=1.0, eviction=Eviction(age=2, every=3))
BOUNDED = Eviction(every=3, max_rows=15, default_row="mean")
ITEMS = replace(USERS, name="items", admission=ADMISSION, eviction=BOUNDED)
WORDS = TableSettings("words", 3, optimizer="sgd", lr=0.1, dtype="float64", init_scale=1.0)
FEATURES = {"user": Feature("users"), "items": Feature("items", pooling="mean"), "words": Feature("words")}


def batch_of(step: int, rank: int = 0, world: int = 1) -> dict[str, JaggedIds]:
    generator = np.random.default_rng(step)
    found = {}
    for name in FEATURES:
        ids = torch.from_numpy(generator.integers(0, 40, (BATCH, 2)))[rank::world]
        found[name] = JaggedIds(ids.reshape(-1), torch.full((len(ids),), 2))
    return found


def trained(
    servers: RowServers | None,
    steps: range,
    parts: list[SparseState],
    *,
    group: dist.ProcessGroup | None = None,
    pause: float = 0.0,
    clip: bool = False,
) -> tuple[list[float], SparseState]:
    rank, world = (dist.get_rank(), dist.get_world_size()) if group else (0, 1)
    tables = SparseEmbeddings([USERS, ITEMS, WORDS], FEATURES, seed=3, group=group, servers=servers)
    if parts:
        tables.load(parts)
    losses = []
    for step in steps:
        pooled = tables(batch_of(step, rank, world))
        loss = torch.cat([pooled[name].flatten(1) for name in FEATURES], dim=1).sum(1).sin().sum()
        loss.backward()
        if step % 4 == 3:
            tables.discard()
        else:
            scale = 1 / (1 + tables.gradient_norm()) if clip else 0.5
            tables.apply_gradients(scale=scale, lr_factor=1 / (1 + step))
        losses.append(loss.item())
        time.sleep(pause)
    return losses, tables.state()


def on_a_rank(servers: RowServers | None, steps: range, parts: list[SparseState]) -> tuple[list[float], SparseState]:
    return trained(servers, steps, parts, group=dist.group.WORLD, clip=True)


@contextmanager
def serving(
    *folders: Path, ports: tuple[int, ...] = (), every: int = 3
) -> Iterator[tuple[RowServers, list[RowServer]]]:
    """Servers in threads of this process."""
    listen = ports or (0,) * len(folders)
    servers = [
        RowServer(("127.0.0.1", port), SECRET, folder, snapshot_every=every)
        for folder, port in zip(folders, listen, strict=True)
    ]
    for server in servers:
        threading.Thread(target=server.serve, daemon=True).start()
    try:
        yield RowServers(tuple(server.address for server in servers), SECRET, patience=20), servers
    finally:
        for server in servers:
            server.close()


def rows_of(parts: list[SparseState]) -> dict[str, list[torch.Tensor]]:
    found = {}
    for name in ("users", "items", "words"):
        tables = [part.tables[name] for part in parts if name in part.tables]
        order = torch.cat([table.ids for table in tables]).argsort()
        columns = ("ids", "values", "optimizer", "seen", "last")
        found[name] = [torch.cat([getattr(table, column) for table in tables])[order] for column in columns]
        found[name].append(tables[0].evicted[:1])
    return found


def same(found: list[SparseState], expected: list[SparseState], tolerance: float = 0.0) -> None:
    for name, columns in rows_of(expected).items():
        assert len(columns[0])
        torch.testing.assert_close(rows_of(found)[name], columns, rtol=tolerance, atol=tolerance)


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
    losses, state = trained(None, range(STEPS), [], clip=True)
    with serving(tmp_path / "a", tmp_path / "b") as (servers, _):
        ranks = pool.run(on_a_rank, servers, range(STEPS), [], world=world)
    assert [sum(parts) for parts in zip(*(losses for losses, _ in ranks), strict=True)] == pytest.approx(
        losses, rel=1e-12
    )
    same([part for _, part in ranks], [state], 1e-11)


def test_states_of_trainers_and_of_servers_are_the_same_kind(pool: Pool, tmp_path: Path) -> None:
    losses, _ = trained(None, range(STEPS), [], clip=True)
    _, half = trained(None, range(4), [], clip=True)
    with serving(tmp_path / "a", tmp_path / "b", tmp_path / "c") as (servers, _):
        ranks = pool.run(on_a_rank, servers, range(4, 6), [half], world=2)
    rest, _ = trained(None, range(6, STEPS), [part for _, part in ranks], clip=True)
    assert rest == pytest.approx(losses[6:], rel=1e-12)


def test_a_server_that_was_closed_goes_on_from_its_folder(tmp_path: Path) -> None:
    losses, state = trained(None, range(STEPS), [])
    with serving(tmp_path / "a", tmp_path / "b") as (servers, running):
        results: list[tuple[list[float], SparseState]] = []
        thread = threading.Thread(target=lambda: results.append(trained(servers, range(STEPS), [], pause=0.1)))
        thread.start()
        for _ in range(3):
            time.sleep(0.15)
            restart(running, 1, tmp_path / "b")
        thread.join()
    [(served, part)] = results
    assert served == losses
    same([part], [state])


def test_a_step_that_a_lost_server_did_not_hear_is_said_again(tmp_path: Path) -> None:
    ids = {"words": JaggedIds.single(torch.arange(5))}
    found = []
    with serving(tmp_path / "a") as (servers, running):
        for of in (None, servers):
            tables = SparseEmbeddings([WORDS], {"words": Feature("words")}, seed=3, servers=of)
            tables(ids)["words"].square().sum().backward()
            if of is not None:
                running[0].close()  # all that follows is lost
            threading.Timer(0.3, restart, (running, 0, tmp_path / "a")).start()
            tables.apply_gradients()
            found.append(tables(ids)["words"].detach())
            time.sleep(0.4)
    assert torch.equal(*found)


@pytest.mark.parametrize("every", [3, 1000], ids=["from snapshots", "from the log"])
def test_servers_know_what_has_changed_since_a_base_when_they_return(every: int, tmp_path: Path) -> None:
    """Of rows that were seen and ids that were evicted, also before a snapshot that a lost server starts from."""
    found: list[list[list[SparseState]]] = []
    with serving(tmp_path / "a", tmp_path / "b", every=every) as (servers, running):
        for of in (None, servers):
            tables, states = SparseEmbeddings([USERS, ITEMS, WORDS], FEATURES, seed=3, servers=of), []
            base = 0
            for number in range(16):
                tables({name: _old_ids(ids, number) for name, ids in batch_of(number).items()})
                tables.apply_gradients()
                if number in (4, 9):
                    base = tables.version
                    tables.rebase(base, by="checkpoint")
                if of is not None and number in (2, 4, 6, 8, 11, 13):
                    restart(running, number % 4 // 2, tmp_path / "ab"[number % 4 // 2], every)
                if number in (8, 15):
                    states.append([*tables.parts(since=base, rows=5, is_base=False)])
            found.append(states)
    evicted = 0
    for own, others in zip(*found, strict=True):
        same(others, own)
        for name in ("users", "items", "words"):
            there, here = (
                torch.cat([part.tables[name].removed for part in parts if name in part.tables]).sort().values
                for parts in (own, others)
            )
            assert torch.equal(there, here)
            evicted += len(here)
    assert evicted > 20


def _old_ids(ids: JaggedIds, step: int) -> JaggedIds:
    """Ids that come for a few steps and then no more."""
    return JaggedIds(ids.ids + 13 * (step // 2), ids.lengths)


def restart(running: list[RowServer], number: int, folder: Path, every: int = 3) -> None:
    """A server again at the same address, as after it was killed."""
    running[number].close()
    running[number] = RowServer(running[number].address, SECRET, folder, snapshot_every=every)
    threading.Thread(target=running[number].serve, daemon=True).start()


def words(servers: RowServers) -> SparseEmbeddings:
    return SparseEmbeddings([WORDS], {"words": Feature("words")}, seed=3, servers=servers)


def step(tables: SparseEmbeddings) -> torch.Tensor:
    rows = tables({"words": JaggedIds.single(torch.arange(5))})["words"]
    rows.square().sum().backward()
    tables.apply_gradients()
    return rows.detach()


@pytest.mark.parametrize("staleness", [0, 8])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_server_that_lost_the_rows_ends_the_run(staleness: int, steps: int, tmp_path: Path) -> None:
    """It would give first values, or wait for ever for steps that nobody makes again."""
    with serving(tmp_path / "a") as (servers, running):
        tables = words(replace(servers, staleness=staleness, patience=3))
        for _ in range(steps):
            step(tables)
        running[0].close()
        shutil.rmtree(tmp_path / "a")
        restart(running, 0, tmp_path / "a")
        with pytest.raises(RunFailed, match="no longer has this run's rows"):
            step(tables), step(tables)


def test_a_run_that_another_has_replaced_ends_and_leaves_the_other_alone(tmp_path: Path) -> None:
    with serving(tmp_path / "a") as (servers, running):
        first = words(replace(servers, patience=3))
        step(first)
        second = words(servers)
        rows = [step(second)]
        with pytest.raises(RunFailed, match="no longer has this run's rows"):
            step(first), step(first)
        restart(running, 0, tmp_path / "a")
        late = {**running[0]._run, "name": first._fused[0].source._links[0]._hello["run"]["name"]}
        link = ServerConnection.dial(servers.addresses[0], SECRET)  # a trainer of the first run that comes late
        link.send({"run": late, "trainer": 1})
        assert "no longer has" in link.receive()[0]["error"]
        link.close()
        rows += [step(second), step(second)]
        assert second.version == 3
    alone = SparseEmbeddings([WORDS], {"words": Feature("words")}, seed=3)
    assert torch.equal(torch.stack(rows), torch.stack([step(alone) for _ in range(3)]))


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
        step(words(servers))  # a run that begins is served again


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


def test_a_state_is_asked_for_again_after_a_server_was_lost(tmp_path: Path) -> None:
    _, state = trained(None, range(3), [])
    with serving(tmp_path / "a") as (servers, running):
        tables = SparseEmbeddings([USERS, ITEMS, WORDS], FEATURES, seed=3, servers=servers)
        for number in range(3):
            pooled = tables(batch_of(number))
            torch.cat([pooled[name].flatten(1) for name in FEATURES], dim=1).sum(1).sin().sum().backward()
            tables.apply_gradients(scale=0.5, lr_factor=1 / (1 + number))
        running[0].close()
        threading.Timer(0.3, restart, (running, 0, tmp_path / "a")).start()
        same([tables.state()], [state])
        parts = tables.parts(rows=5)
        found = [next(parts), next(parts)]
        restart(running, 0, tmp_path / "a")
        found += parts
        assert len(found) > 4
        same(found, [state])


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


def test_both_sides_notice_a_host_that_is_gone(tmp_path: Path) -> None:
    with serving(tmp_path / "a") as (servers, [server]):
        tables = words(servers)
        step(tables)
        [accepted] = server._connected
        for side in (accepted, tables._fused[0].source._links[0].connection._connection):
            assert side.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            tcp = [socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT]
            idle, interval, count, longest = (side.getsockopt(socket.IPPROTO_TCP, option) for option in tcp)
            assert idle + interval * count == LOST == longest / 1000


def test_a_server_that_is_lost_during_a_load_ends_the_run(tmp_path: Path) -> None:
    """What it had been given was not on its disk yet, and must not be missing without a word."""
    _, state = trained(None, range(4), [])

    def parts(running: list[RowServer]) -> Iterator[SparseState]:
        yield replace(state, tables={"users": state.tables["users"]})
        restart(running, 0, tmp_path / "a")
        yield replace(state, tables={"items": state.tables["items"]})

    with serving(tmp_path / "a") as (servers, running):
        tables = SparseEmbeddings([USERS, ITEMS], {}, seed=3, servers=replace(servers, patience=3))
        with pytest.raises(RunFailed, match="lost while rows were being loaded"):
            tables.load(parts(running))


SERVER = """
import sys
from pathlib import Path
from stoker.sparse.servers.row_server import RowServer
RowServer(("127.0.0.1", int(sys.argv[1])), bytes(range(32)), Path(sys.argv[2]), snapshot_every=3).serve()
"""


@pytest.mark.slow  # processes import torch several times
def test_a_killed_server_goes_on_from_its_folder(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def started() -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", SERVER, str(port), str(tmp_path / "a")])

    losses, state = trained(None, range(STEPS), [])
    process, results = started(), list[tuple[list[float], SparseState]]()
    servers = RowServers((("127.0.0.1", port),), SECRET, patience=60)
    thread = threading.Thread(target=lambda: results.append(trained(servers, range(STEPS), [], pause=0.3)))
    thread.start()
    draws = random.Random(0)
    kills = 0
    while thread.is_alive():
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", port)).close()
            time.sleep(0.5 + draws.random())
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            kills += 1
            process = started()
        time.sleep(0.1)
    process.kill(), process.wait()
    [(served, part)] = results
    assert kills > 1
    assert served == losses
    same([part], [state])


def push(link: ServerConnection, step: int) -> None:
    """A trainer's part of a step: a gradient of 1 for the row of id 7."""
    arrays = [np.array([7]), np.array([0]), np.array([1]), np.ones((1, 3))]
    link.send({"kind": "push", "layout": 0, "step": step}, arrays)
    link.send({"kind": "commit", "layout": 0, "step": step, "scale": 1.0, "lr_factor": 1.0})


@pytest.mark.parametrize(("least", "waits"), [(1, True), (0, False)])
def test_a_lookup_waits_for_the_steps_that_it_must_have(least: int, waits: bool, tmp_path: Path) -> None:
    """A trainer that is ahead waits for the other's steps, but for as many as the bound allows."""
    run = {"name": "r", "seed": 0, "servers": 1, "trainers": 2, "number": 0, "layouts": [[dict_of(WORDS)]]}
    with serving(tmp_path / "a") as (servers, [server]):
        links = [ServerConnection.dial(servers.addresses[0], SECRET) for _ in range(2)]
        for trainer, link in enumerate(links):
            link.send({"run": run, "trainer": trainer})
            link.receive()
        push(links[0], 0)
        answers: list[np.ndarray] = []
        thread = threading.Thread(target=lambda: answers.extend(links[0].receive()[1]))
        message = {"kind": "values", "layout": 0, "least": least, "training": True}
        links[0].send(message, [np.array([7]), np.array([0])])
        thread.start()
        thread.join(0.3)
        assert thread.is_alive() == waits
        push(links[1], 0)
        thread.join(20)
        push(links[0], 0)  # said again, as after a lost connection
        links[0].send({**message, "least": 1}, [np.array([7]), np.array([0])])
        [after], [before] = links[0].receive()[1], answers
        assert np.allclose(before - after, 0 if waits else 0.2)
        assert not server._shards[0]._steps
        for link in links:
            link.close()


def run_ahead(servers: RowServers) -> int:
    """The first trainer makes as many steps as the bound allows before the second one makes any."""
    tables = SparseEmbeddings([WORDS], {"words": Feature("words")}, group=dist.group.WORLD, servers=servers)
    if dist.get_rank() == 1:
        dist.barrier()
    for _ in range(servers.staleness + 1):
        tables({"words": JaggedIds.single(torch.tensor([7]))})["words"].sum().backward()
        tables.apply_gradients()
    if dist.get_rank() == 0:
        dist.barrier()
    return int(tables.state().step)


def test_a_trainer_may_be_ahead_as_far_as_the_bound_says(pool: Pool, tmp_path: Path) -> None:
    with serving(tmp_path / "a") as (servers, _):
        assert pool.run(run_ahead, replace(servers, staleness=3), world=2, timeout=30) == [4, 4]


def test_a_stale_run_learns_as_well(tmp_path: Path) -> None:
    """One trainer never waits for itself: with any bound its lookups have all of its own steps."""
    losses, _ = trained(None, range(STEPS), [])
    with serving(tmp_path / "a") as (servers, _):
        stale, _ = trained(replace(servers, staleness=2), range(STEPS), [])
    assert stale == pytest.approx(losses, rel=1e-12)


def test_without_the_secret_nothing_is_served(tmp_path: Path) -> None:
    with serving(tmp_path / "a") as (servers, _), pytest.raises(RunFailed, match="the server of rows at"):
        trained(replace(servers, secret=bytes(32), patience=0.5), range(1), [])


def test_strangers_take_no_more_than_their_places(tmp_path: Path) -> None:
    with serving(tmp_path / "a") as (servers, [server]):
        strangers = [socket.create_connection(servers.addresses[0]) for _ in range(70)]
        for stranger in strangers[-3:]:  # 32 random bytes for those that there is room for, an end for the others
            assert stranger.recv(64) == b""
        assert len(server._strangers) == 64
        for stranger in strangers:
            stranger.close()
        trained(servers, range(1), [])
        assert not server._strangers


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
