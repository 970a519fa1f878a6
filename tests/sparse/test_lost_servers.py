"""Lost or killed servers, and their state after a restart."""

from __future__ import annotations

import errno
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from served_tables import (
    FEATURES,
    ITEMS,
    SECRET,
    STEPS,
    USERS,
    WORDS,
    batch_of,
    restart,
    same,
    serving,
    step,
    trained,
    words,
)

from stoker.errors import RunFailed, UserError
from stoker.sparse import Feature, JaggedIds, SparseEmbeddings
from stoker.sparse.servers import RowServers
from stoker.sparse.servers.row_server import RowServer
from stoker.sparse.servers.served_shard import ServedShard
from stoker.sparse.servers.server_connection import LOST, ServerConnection
from stoker.sparse.sparse_state import SparseState
from stoker.sparse.table_shard import TableShard

pytestmark = pytest.mark.usefixtures("warm_processes")


def test_servers_that_cannot_be_reached_are_named(tmp_path: Path) -> None:
    with serving(tmp_path / "a") as (servers, _):
        with socket.create_server(("127.0.0.1", 0)) as free:
            absent = free.getsockname()
        (line,) = replace(servers, addresses=(*servers.addresses, absent)).unreachable()
        assert f"127.0.0.1:{absent[1]} cannot be reached" in line and "waits for it, at most 20 s" in line


def test_a_server_that_ends_before_its_challenge_is_not_suspected_of_another_secret() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def end_at_once() -> None:
            server.accept()[0].close()

        thread = threading.Thread(target=end_at_once)
        thread.start()
        with pytest.raises(ConnectionResetError, match=r"^the other side has gone$"):
            ServerConnection.dial(server.getsockname(), SECRET)
        thread.join()


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


def test_a_step_that_a_lost_server_did_not_hear_is_said_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = {"words": JaggedIds.single(torch.arange(5))}
    found = []
    with serving(tmp_path / "a") as (servers, running):
        for of in (None, servers):
            tables = SparseEmbeddings([WORDS], {"words": Feature("words")}, seed=3, servers=of)
            tables(ids)["words"].square().sum().backward()
            if of is not None:
                running[0].close()  # all later updates are lost
            threading.Timer(0.3, restart, (running, 0, tmp_path / "a")).start()
            tables.apply_gradients()
            found.append(tables(ids)["words"].detach())
            time.sleep(0.4)
    assert torch.equal(*found)
    said = capsys.readouterr().err
    assert said.count("was lost: ") == 1 and "the run waits for it, at most 20 s" in said


def test_no_server_is_asked_between_the_lookups_of_a_step_and_its_end(tmp_path: Path) -> None:
    """A lost server that waits for all trainers would not hear one that waits for another trainer."""
    with serving(tmp_path / "a") as (servers, running):
        tables = words(replace(servers, patience=3))
        loss = tables({"words": JaggedIds.single(torch.arange(5))})["words"].sum()
        running[0].close()
        loss.backward()
        assert tables.gradients_are_finite()
        restart(running, 0, tmp_path / "a")
        tables.apply_gradients()


@pytest.mark.parametrize("every", [3, 1000], ids=["from snapshots", "from the log"])
def test_servers_know_what_has_changed_since_a_base_when_they_return(every: int, tmp_path: Path) -> None:
    """Checks changed rows and evicted ids, also from before the snapshot that a lost server restarts from."""
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
    """Returns ids that occur for a few steps only."""
    return JaggedIds(ids.ids + 13 * (step // 2), ids.lengths)


@pytest.mark.parametrize("staleness", [0, 8])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_server_that_lost_the_rows_ends_the_run(staleness: int, steps: int, tmp_path: Path) -> None:
    """It would return initial values, or wait forever for steps that are not repeated."""
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
        link = ServerConnection.dial(servers.addresses[0], SECRET)  # a late trainer of the first run
        link.send({"run": late, "trainer": 1})
        assert "no longer has" in link.receive()[0]["error"]
        link.close()
        rows += [step(second), step(second)]
        assert second.version == 3
    alone = SparseEmbeddings([WORDS], {"words": Feature("words")}, seed=3)
    assert torch.equal(torch.stack(rows), torch.stack([step(alone) for _ in range(3)]))


def test_a_folder_is_one_servers_and_other_files_stay_in_it(tmp_path: Path) -> None:
    for name in ("rows", "layout-0", "run.json"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text("[]")
        with pytest.raises(UserError, match=f"has {name}, and is not the folder of a table server"):
            RowServer(("127.0.0.1", 0), SECRET, tmp_path / name)
    (tmp_path / "a" / "lost+found").mkdir(parents=True)  # a volume's own
    with serving(tmp_path / "a") as (servers, _):
        step(words(servers))
        (tmp_path / "a" / "run.secret").touch()
        step(words(servers))  # the second run replaces the first
        assert {"lost+found", "run.secret", "run.json", "layout-0"} <= {
            path.name for path in (tmp_path / "a").iterdir()
        }
        with pytest.raises(UserError, match="another table server uses"):
            RowServer(("127.0.0.1", 0), SECRET, tmp_path / "a")
    RowServer(("127.0.0.1", 0), SECRET, tmp_path / "a").close()


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


def test_both_sides_notice_a_host_that_is_gone(tmp_path: Path) -> None:
    with serving(tmp_path / "a") as (servers, [server]):
        tables = words(servers)
        step(tables)
        [accepted] = server._connected
        for side in (accepted, tables._fused[0].source._links[0].connection._connection):
            assert side.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert side.gettimeout() is None  # a step may take long
            tcp = [socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT]
            idle, interval, count, longest = (side.getsockopt(socket.IPPROTO_TCP, option) for option in tcp)
            assert idle + interval * count == LOST == longest / 1000


def test_a_server_that_is_lost_during_a_load_ends_the_run(tmp_path: Path) -> None:
    """Its loaded rows were not on its disk yet, and must not be lost silently."""
    _, state = trained(None, range(4), [])

    def parts(running: list[RowServer]) -> Iterator[SparseState]:
        yield replace(state, tables={"users": state.tables["users"]})
        restart(running, 0, tmp_path / "a")
        yield replace(state, tables={"items": state.tables["items"]})

    with serving(tmp_path / "a") as (servers, running):
        tables = SparseEmbeddings([USERS, ITEMS], {}, seed=3, servers=replace(servers, patience=3))
        with pytest.raises(RunFailed, match="lost while rows were being loaded"):
            tables.load(parts(running))


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), MemoryError("4 GiB")])
def test_an_update_that_a_server_cannot_make_ends_the_run(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The server would count a step without its update. It makes the step from its log when it starts again."""
    alone = SparseEmbeddings([WORDS], {"words": Feature("words")}, seed=3)
    step(alone)
    update = TableShard.update

    def fails(*args: object, **kwargs: object) -> None:
        monkeypatch.setattr(TableShard, "update", update)  # once
        raise error

    with serving(tmp_path / "a") as (servers, running):
        tables = words(replace(servers, patience=3))
        monkeypatch.setattr(TableShard, "update", fails)
        with pytest.raises(RunFailed, match=f"a step could not be made: {type(error).__name__}: .*{error.args[-1]}"):
            step(tables), step(tables)
        assert ("in fails" in capfd.readouterr().err) == (not isinstance(error, OSError))  # a traceback only for a bug
        restart(running, 0, tmp_path / "a")
        [(_, found)] = running[0]._shards[0].shard.state(rows=100, is_base=False)
    expected = alone.state().tables["words"]
    assert torch.equal(found.values[found.ids.argsort()], expected.values[expected.ids.argsort()])


def test_a_connection_that_cannot_be_accepted_does_not_end_a_server(tmp_path: Path) -> None:
    class Listening:
        """A socket whose first connection fails, as when too many files are open."""

        def __init__(self, listening: socket.socket) -> None:
            self.listening, self.fails = listening, True

        def accept(self) -> object:
            if self.fails:
                self.fails = False
                raise OSError(errno.EMFILE, "Too many open files")
            return self.listening.accept()

        def __getattr__(self, name: str) -> object:
            return getattr(self.listening, name)

    server = RowServer(("127.0.0.1", 0), SECRET, tmp_path / "a")
    server._listening = Listening(server._listening)  # type: ignore[assignment]
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    step(words(RowServers((server.address,), SECRET, patience=3)))
    server.close()
    thread.join(10)
    assert not thread.is_alive()


def test_a_request_that_a_server_cannot_answer_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> None:
        raise KeyError("rows")

    monkeypatch.setattr(ServedShard, "counts", fails)
    with serving(tmp_path / "a") as (servers, _):
        tables = words(servers)
        step(tables)
        with pytest.raises(RunFailed, match="cannot go on: KeyError: 'rows'"):
            tables._fused[0].source.counts()


def test_a_server_that_is_lost_at_each_repetition_of_a_request_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object) -> None:
        raise ConnectionResetError

    monkeypatch.setattr(ServedShard, "counts", fails)
    with serving(tmp_path / "a") as (servers, _):
        tables = words(servers)
        step(tables)
        with pytest.raises(RunFailed, match="was lost 11 times before it answered a request"):
            tables._fused[0].source.counts()


def test_any_number_of_losses_with_answers_between_them_is_survived(tmp_path: Path) -> None:
    with serving(tmp_path / "a") as (servers, _):
        tables = words(servers)
        tables({"words": JaggedIds.single(torch.arange(12))})["words"].sum().backward()
        tables.apply_gradients()
        source = tables._fused[0].source
        [link] = source._links
        for _ in range(12):
            link.ask(source._about("counts"))
            link.connection.close()
            assert link.answer()[0]["counts"] == {"words": 12}
        parts = link.answers(source._about("state", since=None, rows=1, least=1, is_base=False))
        ids = []
        for _, arrays in parts:
            ids += arrays[0].tolist()
            link.connection.close()
        assert sorted(ids) == list(range(12)) and link.losses == 24


def test_a_server_that_lost_steps_ends_the_run(tmp_path: Path) -> None:
    """Its machine lost power before the steps were on the disk; the trainers do not repeat steps that were made."""
    with serving(tmp_path / "a", every=1000) as (servers, running):
        tables = words(replace(servers, patience=3))
        step(tables)
        tables.state()
        [log] = (tmp_path / "a" / "layout-0").glob("steps-*")
        before = log.read_bytes()
        step(tables), step(tables)
        running[0].close()
        log.write_bytes(before)
        restart(running, 0, tmp_path / "a")
        with pytest.raises(RunFailed, match="it has lost steps of this run"):
            step(tables), step(tables)


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

    expected, state = trained(None, range(STEPS), [])
    process, losses, results = started(), list[float](), list[SparseState]()
    servers = RowServers((("127.0.0.1", port),), SECRET, patience=120)

    def train() -> None:
        results.append(trained(servers, range(STEPS), [], pause=0.3, losses=losses)[1])

    thread = threading.Thread(target=train)
    thread.start()
    draws = random.Random(0)
    for kill in range(3):
        while len(losses) <= 2 * kill:  # a new server makes a step or two before it is killed
            assert thread.is_alive()
            time.sleep(0.02)
        time.sleep(0.3 * draws.random())
        process.kill(), process.wait()
        process = started()
    thread.join()
    process.kill(), process.wait()
    assert losses == expected
    same(results, [state])
