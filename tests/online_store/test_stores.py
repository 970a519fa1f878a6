"""Tables in LMDB and Redis against a dict of each version, and the reader's cache, dtypes and default row."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
import torch
from redis.connection import Connection

from stoker.cli.main import main
from stoker.errors import RunFailed, UserError
from stoker.online_store import lmdb_writer, redis_writer, row_backends, row_reader
from stoker.online_store.lmdb_writer import LmdbWriter
from stoker.online_store.redis_writer import hset_command
from stoker.online_store.row_backends import RedisBackend, StoredTable, StoreError
from stoker.online_store.row_reader import RowReader
from stoker.online_store.shard_writer import write_shards
from stoker.online_store.store_version import ABANDONED, TableDelta
from stoker.online_store.store_writers import (
    StoreWriter,
    existing_store,
    keep_newest,
    roll_back,
    shown_place,
    store_errors,
    writer_of,
)
from stoker.online_store.stored_ids import is_stored
from stoker.serve.ranking_server import open_scorers
from stoker.sparse.value_format import RowFormat

TABLES = (StoredTable(0, "users", 4, "float32"), StoredTable(1, "items (first order)", 1, "float32"))
NONE = np.empty(0, np.int64)


def manifest(updates: int = 0, tables: tuple[StoredTable, ...] = TABLES) -> dict[str, object]:
    entries = [{"name": table.name, "width": table.width, "dtype": table.dtype} for table in tables]
    return {"format": 1, "tables": entries, "updates": updates, "run": "run", "step": 7, "made": 1.5}


def delta(table: StoredTable, rows: dict[int, float], removed: tuple[int, ...] = ()) -> TableDelta:
    ids = np.array(sorted(rows), np.int64)
    values = np.array([[rows[i]] * table.width for i in ids.tolist()], np.float32).reshape(len(ids), table.width)
    return TableDelta(table, ids, values.view(np.uint8), np.array(removed, np.int64))


def loaded(writer: StoreWriter, users: dict[int, float], items: dict[int, float], **more: object) -> int:
    """A new version, which is the current one, with more in its manifest."""
    version = writer.begin()
    writer.put(version, delta(TABLES[0], users))
    writer.put(version, delta(TABLES[1], items))
    writer.seal(version, manifest() | more, {"tower": b"of %d" % version})
    writer.switch(version)
    return version


@pytest.fixture(params=["lmdb", "redis"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "lmdb":
        return f"lmdb://{tmp_path / 'store'}"
    return f"{request.getfixturevalue('redis_place')}?prefix={tmp_path.name}"


def first(reader: RowReader, *ids: int) -> list[float]:
    """The first number of each row of a user."""
    return reader.rows({"users": np.array(ids, np.int64)})["users"][:, 0].tolist()


def test_rows_are_those_of_a_dict_through_versions_updates_and_a_way_back(place: str) -> None:
    random, writer = np.random.default_rng(0), writer_of(place)
    extremes = [-(2**63), -1, 0, 2**63 - 1]
    models: dict[int, tuple[dict[int, float], dict[int, float]]] = {}
    for _ in range(3):
        ids = [*random.integers(-(2**63), 2**63 - 1, 40).tolist(), *extremes]
        users, items = ({i: float(random.integers(1, 99)) for i in ids} for _ in range(2))
        models[loaded(writer, users, items)] = (users, items)
    for updates in range(1, 4):
        users, items = models[2]
        old, new = random.choice(list(users), 5).tolist(), random.integers(0, 99, 5).tolist()
        changed = {i: float(random.integers(100, 999)) for i in (*old[:3], *new)}
        writer.update(2, [delta(TABLES[0], changed, tuple(set(old[3:]) - changed.keys()))], manifest(updates), {})
        models[2] = {i: v for i, v in users.items() if i not in old[3:]} | changed, items
    for version, (users, items) in models.items():
        reader = RowReader(place, version=version)
        ids = np.array([*users, *random.integers(-99, 99, 50), *list(users)[:9]], np.int64)
        found = reader.rows({"users": ids, "items (first order)": ids})
        assert found["users"].tolist() == [[users.get(i, 0.0)] * 4 for i in ids.tolist()]
        assert found["items (first order)"][:, 0].tolist() == [items.get(i, 0.0) for i in ids.tolist()]
        assert writer.rows_of(version, TABLES[0]) == len(users) and reader.file("tower") == b"of %d" % version
    assert RowReader(place, version=2).head == "2.3" and RowReader(place).version == 3
    follower = RowReader(place)
    assert roll_back(writer) == (3, 2) and roll_back(writer) == (2, 1) and roll_back(writer, 3) == (1, 3)
    roll_back(writer, 1)
    one = next(iter(models[1][0]))
    assert first(follower, one) == [models[1][0][one]] and follower.file("tower") == b"of 1"
    with pytest.raises(UserError, match="no version before 1"):
        roll_back(writer)
    with pytest.raises(UserError, match="no version 9: there are 1, 2, 3"):
        roll_back(writer, 9)


def test_a_version_is_unseen_until_the_switch_and_gone_when_dropped(place: str) -> None:
    writer = writer_of(place)
    with pytest.raises(StoreError, match="is empty"):
        RowReader(place)  # LMDB's folder is made by the writer
    loaded(writer, {1: 1.0}, {})
    reader = RowReader(place)
    second = writer.begin()
    writer.put(second, delta(TABLES[0], {1: 2.0}))
    assert first(reader, 1, 2) == [1.0, 0.0] and [v.number for v in writer.versions()] == [1]
    writer.seal(second, manifest(), {"tower": b""})
    assert first(reader, 1) == [1.0]
    writer.switch(second)
    assert first(reader, 1) == [2.0] and reader.version == second
    fixed = RowReader(place, version=1)
    assert keep_newest(writer, 1) == [1] and [v.info for v in writer.versions()] == [
        {"run": "run", "step": 7, "made": 1.5}
    ]
    assert first(reader, 1) == [2.0]
    with pytest.raises(StoreError, match="no version 1"):
        first(fixed, 1)
    with pytest.raises(StoreError, match="version 1 is gone"):
        writer.update(1, [], manifest(), {})
    with pytest.raises(StoreError, match="no tower of version 2"):
        reader.file("tower")
    with pytest.raises(StoreError, match="no table 'sellers'"):
        reader.rows({"sellers": NONE})


def test_a_version_that_never_was_current_is_no_way_back(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = writer_of(place)
    loaded(writer, {1: 1.0}, {})
    killed = writer.begin()  # while it was checked
    writer.put(killed, delta(TABLES[0], {1: 2.0}))
    writer.seal(killed, manifest(), {"tower": b""})
    loaded(writer, {1: 3.0}, {})
    assert roll_back(writer) == (3, 1) and [v.number for v in writer.versions()] == [1, 3]
    assert keep_newest(writer, 1) == [] and first(RowReader(place, version=killed), 1) == [2.0]
    later = time.time() + ABANDONED + 1
    monkeypatch.setattr(time, "time", lambda: later)
    writer.begin()
    with pytest.raises(StoreError, match=f"version {killed} is gone"):
        writer.switch(killed)


def test_an_update_does_not_bring_back_a_version_that_is_dropped_meanwhile(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, other = writer_of(place), writer_of(place)
    loaded(writer, {1: 1.0}, {}), loaded(writer, {1: 2.0}, {})
    step = "_put" if place.startswith("redis") else "_forget_dead_readers"  # LMDB's transactions wait for each other
    before = getattr(type(writer), step)

    def dropped(self: StoreWriter, *words: Any) -> None:
        before(self, *words)
        other.drop(1)

    monkeypatch.setattr(type(writer), step, dropped)
    with pytest.raises(StoreError, match="version 1 is gone"):
        writer.update(1, [delta(TABLES[0], {2: 9.0})], manifest(1), {})
    assert [v.number for v in writer.versions()] == [2]
    assert place.startswith("lmdb") or writer.rows_of(1, TABLES[0]) == 0
    with pytest.raises(StoreError, match="no version 1"):
        RowReader(place, version=1)


def test_what_was_never_finished_is_removed_later(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = writer_of(place)
    left = writer.begin()
    writer.put(left, delta(TABLES[0], {1: 1.0}))
    assert writer.begin() == left + 1 and writer.rows_of(left, TABLES[0]) == 1
    later = time.time() + ABANDONED + 1
    monkeypatch.setattr(time, "time", lambda: later)
    new = loaded(writer, {2: 2.0}, {})
    assert new == left + 2 and [v.number for v in writer.versions()] == [new]
    if place.startswith("redis"):
        backend = RedisBackend(place)
        assert not list(backend.client.scan_iter(backend.key(left, "*")))


def test_rows_are_not_written_to_a_version_that_was_not_begun_here(place: str) -> None:
    writer = writer_of(place)
    begun = writer.begin()
    for absent in (begun + 1, begun):
        with pytest.raises(StoreError, match=f"version {absent} is gone"):
            writer.put(absent, delta(TABLES[0], {1: 1.0}))
        writer.drop(begun)


def test_dropping_a_version_leaves_those_whose_numbers_begin_alike(place: str) -> None:
    writer = writer_of(place)
    for number in range(1, 11):
        loaded(writer, {1: float(number)}, {})
    writer.drop(1)
    reader = RowReader(place, version=10)
    assert first(reader, 1) == [10.0] and reader.file("tower") == b"of 10"
    assert [v.number for v in writer.versions()] == list(range(2, 11))


def test_a_version_is_not_abandoned_while_rows_are_written_to_it(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, start = writer_of(place), time.time()
    slow = writer.begin()
    for passed in (0.9, 1.8):
        monkeypatch.setattr(time, "time", lambda now=start + passed * ABANDONED: now)
        writer.put(slow, delta(TABLES[0], {1: passed}))
        writer.begin()
    assert writer.rows_of(slow, TABLES[0]) == 1


def test_many_rows_are_written_and_removed_in_parts(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (lmdb_writer, redis_writer):
        monkeypatch.setattr(module, "CHUNK", 3)
    writer = writer_of(place)
    version = writer.begin()
    writer.put(version, delta(TABLES[0], {i: float(i) for i in range(1, 12)}))
    writer.put(version, delta(TABLES[0], {}, tuple(range(1, 8))))
    writer.seal(version, manifest(), {})
    assert first(RowReader(place, version=version), *range(1, 12)) == [0.0] * 7 + [8.0, 9.0, 10.0, 11.0]


def test_the_ids_that_have_a_row_are_found(place: str) -> None:
    loaded(writer_of(place), {1: 1.0, -5: 2.0}, {})
    reader = RowReader(place)
    found = is_stored(reader, {"users": np.array([7, 1, -5, 7, 1]), TABLES[1].name: NONE})
    assert found["users"].tolist() == [False, True, True, False, True] and found[TABLES[1].name].tolist() == []
    with pytest.raises(StoreError, match="no table 'sellers'"):
        is_stored(reader, {"sellers": NONE})


def test_a_server_of_redis_that_is_silent_does_not_stop_a_reader_for_ever() -> None:
    for query, expected in (("", (60.0, 10.0)), ("?socket_timeout=5&socket_connect_timeout=2", (5.0, 2.0))):
        options = RedisBackend(f"redis://127.0.0.1:1/0{query}").client.connection_pool.connection_kwargs
        assert (options["socket_timeout"], options["socket_connect_timeout"]) == expected


def test_dropping_a_version_leaves_other_prefixes_alone(redis_place: str, tmp_path: Path) -> None:
    names = [f"{tmp_path.name}{end}" for end in ("ads", "ads:1", "ads:1:1", "a*", "a[d]s", "a?s", "a\\ds")]
    writers = [writer_of(f"{redis_place}?prefix={quote(name)}") for name in names]
    for writer in writers:
        loaded(writer, {1: 1.0}, {1: 1.0})
    for number, writer in enumerate(writers):
        writer.drop(1)
        assert not writer.rows_of(1, TABLES[0]) and not writer.versions()
        for other in writers[number + 1 :]:
            assert [v.number for v in other.versions()] == [other.current()] == [1]
            assert other.rows_of(1, TABLES[0]) == other.rows_of(1, TABLES[1]) == 1
    left = RedisBackend(redis_place).client.keys(f"{tmp_path.name}*")
    assert {key.rpartition(b":")[2] for key in left} == {b"current", b"last"}


def test_the_cache_is_as_old_as_allowed_and_ends_with_the_version(place: str) -> None:
    writer = writer_of(place)
    loaded(writer, dict.fromkeys(range(64), 1.0), {})
    reader = RowReader(place, cache_rows=16, cache_seconds=0.2)
    everyone = list(range(70))
    assert first(reader, *everyone) == [1.0] * 64 + [0.0] * 6
    writer.update(1, [delta(TABLES[0], dict.fromkeys(range(70), 2.0))], manifest(1), {})
    found = first(reader, *everyone)
    assert set(found) == {0.0, 1.0, 2.0} and sum(value < 2 for value in found) <= 16  # as many as it has places
    time.sleep(0.2)
    assert first(reader, *everyone) == [2.0] * 70
    loaded(writer, {1: 3.0}, {})
    assert first(reader, *everyone) == [0.0, 3.0] + [0.0] * 68


def test_the_default_row_is_that_of_the_update_that_is_read(place: str) -> None:
    def with_default(value: float, updates: int = 0) -> dict[str, object]:
        made: Any = manifest(updates)
        users, items = made["tables"]
        return made | {"format": 2, "tables": [{**users, "default": [value] * 4}, items]}

    writer = writer_of(place)
    loaded(writer, {1: 3.0}, {2: 4.0}, **with_default(0.5))
    reader = RowReader(place)
    assert first(reader, 1, 7) == [3.0, 0.5]
    writer.update(1, [delta(TABLES[0], {2: 5.0})], with_default(0.25, 1), {})
    assert first(reader, 1, 2, 7) == [3.0, 5.0, 0.25]
    found = reader.rows({table.name: np.array([2, 7]) for table in TABLES})
    assert found["users"].tolist() == [[5.0] * 4, [0.25] * 4] and found["items (first order)"].tolist() == [
        [4.0],
        [0.0],
    ]


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int8"])
def test_rows_of_every_type_are_decoded_as_in_training(dtype: str, place: str, tmp_path: Path) -> None:
    form = RowFormat(dtype, 5)  # type: ignore[arg-type]
    stored = form.encode(torch.randn(30, 5, dtype=form.compute), None)
    table = StoredTable(0, "t", 5, dtype)
    ids = np.sort(np.random.default_rng(1).integers(-99, 99, 200))
    ids = np.unique(ids)[:30]
    part = TableDelta(table, ids, stored.numpy().view(np.uint8), NONE)
    writer = writer_of(place)
    version = writer.begin()
    writer.put(version, part)
    writer.seal(version, manifest(tables=(table,)), {})
    writer.switch(version)
    halves = [TableDelta(table, ids[s], part.rows[s], NONE) for s in (slice(0, 17), slice(17, 30))]
    write_shards(tmp_path, halves, manifest(tables=(table,)), {"tower": b"bytes"})
    for reader in (RowReader(place), RowReader(str(tmp_path))):
        asked = np.concatenate([ids[::-1], [500, -500]])
        found = reader.rows({"t": asked})["t"]
        assert np.array_equal(found[:30], form.decode(stored).numpy()[::-1]) and not found[30:].any()
        assert found.dtype == (np.float64 if dtype == "float64" else np.float32)
    assert RowReader(str(tmp_path)).file("tower") == b"bytes"


def test_a_command_of_many_rows_is_what_the_client_would_send() -> None:
    ids, rows = np.array([5, -(2**63), 2**40]), np.arange(36, dtype=np.uint8).reshape(3, 12)
    words = [word for i, row in zip(ids, rows, strict=True) for word in (i.astype("<i8").tobytes(), row.tobytes())]
    assert b"".join(hset_command(b"key", ids, rows)) == b"".join(Connection().pack_command("HSET", "key", *words))


READS_WHILE_ANOTHER_THREAD_WRITES = """
import sys, threading
from stoker.online_store.lmdb_writer import LmdbWriter
from stoker.online_store.row_backends import LmdbBackend
writer, store = LmdbWriter(sys.argv[1]), LmdbBackend(sys.argv[1])
writer.begin()
rows = writer._rows(1)
writes, may_end = threading.Event(), threading.Event()

def write():
    with store.environment.begin(rows, write=True) as transaction:
        writes.set()
        may_end.wait()
        transaction.put(b"a", b"1")

thread = threading.Thread(target=write, daemon=True)
thread.start()
writes.wait()
assert store.current() == 0  # while the other thread needs the interpreter's lock to end its transaction
store.read(1, {})
threading.Timer(0.2, may_end.set).start()
assert writer.begin() == 2  # waits for it
thread.join()
"""


def test_a_thread_that_opens_a_database_does_not_stop_one_that_writes(tmp_path: Path) -> None:
    command = [sys.executable, "-c", READS_WHILE_ANOTHER_THREAD_WRITES, f"lmdb://{tmp_path}/store"]
    subprocess.run(command, check=True, timeout=60)


IS_KILLED_WHILE_IT_READS = """
import os, signal, sys
from stoker.online_store.row_backends import LmdbBackend
with LmdbBackend(sys.argv[1]).environment.begin():
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_store_does_not_grow_after_a_reader_was_killed(tmp_path: Path) -> None:
    writer = LmdbWriter(f"lmdb://{tmp_path}/store")
    users = {i: float(i) for i in range(500)}
    loaded(writer, users, {})
    subprocess.run([sys.executable, "-c", IS_KILLED_WHILE_IT_READS, writer.place], check=False, timeout=60)
    sizes = []
    for _ in range(30):
        writer.change(1, [delta(TABLES[0], users)])
        sizes.append((tmp_path / "store" / "data.mdb").stat().st_size)
    assert sizes[-1] == sizes[9]


READS_IN_ANOTHER_PROCESS = """
import sys
from stoker.online_store.lmdb_writer import LmdbWriter
from stoker.online_store.row_backends import LmdbBackend
store = LmdbBackend(sys.argv[1])
for _ in range(3):
    assert store.current() == 1
    assert store.read(1, {}) == (1, "1.0", {})
    assert store.read(2, {}) == (1, None, {})
writer = LmdbWriter(sys.argv[1])  # as of a run that goes on
assert writer.current() == 1
assert writer.begin() == 2
assert store.read(2, {}) == (1, None, {})
"""


def test_another_process_reads_what_one_has_written(tmp_path: Path) -> None:
    writer = LmdbWriter(f"lmdb://{tmp_path}/store")
    loaded(writer, {}, {})
    subprocess.run([sys.executable, "-c", READS_IN_ANOTHER_PROCESS, writer.place], check=True, timeout=60)


OPENS_TO_WRITE_WHILE_ANOTHER_THREAD_READS = """
import sys, threading, time
from stoker.online_store.lmdb_writer import LmdbWriter
from stoker.online_store.row_backends import LmdbBackend
store, reads, found = LmdbBackend(sys.argv[1]), threading.Event(), []

def read():
    with store._reading("meta") as (transaction, meta):
        reads.set()
        time.sleep(0.3)
        found.append(transaction.get(b"current", db=meta))

thread = threading.Thread(target=read)
thread.start()
reads.wait()
writer = LmdbWriter(sys.argv[1])  # closes what was opened to read only
thread.join()
assert found == [b"1"] and store.current() == 1 and writer.begin() == 2
"""


def test_a_store_that_a_thread_reads_can_be_opened_to_write(tmp_path: Path) -> None:
    writer = LmdbWriter(f"lmdb://{tmp_path}/store")
    loaded(writer, {}, {})
    command = [sys.executable, "-c", OPENS_TO_WRITE_WHILE_ANOTHER_THREAD_READS, writer.place]
    subprocess.run(command, check=True, timeout=60)


def test_the_reader_can_be_copied_into_a_service() -> None:
    allowed = {"__future__", "numpy", "redis", "lmdb", "json", "threading", "time", "collections", "dataclasses"}
    allowed |= {"contextlib", "io", "os", "pathlib", "stat", "typing", "urllib"}
    lines = 0
    for module in (row_reader, row_backends):
        source = Path(str(module.__file__)).read_text()
        lines += sum(bool(line.strip()) for line in source.splitlines())
        for node in ast.walk(ast.parse(source)):
            names = [n.name for n in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name.split(".")[0] in allowed or name.startswith("stoker.online_store.row_")
    assert lines < 350


def test_what_is_wrong_with_a_place_is_said(
    redis_place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = redis_place.replace("//", "//u:secret@")
    with pytest.raises(RunFailed, match=r"redis://u:\*\*\*@127.0.0.1.*failed") as error, store_errors(place):
        RedisBackend(place).current()  # an open store that does not answer any more
    assert "secret" not in str(error.value) and error.value.exit_code == 1
    with pytest.raises(UserError, match=r"redis://u:\*\*\*@127.0.0.1.*cannot be opened") as refused:
        writer_of(place)
    assert "secret" not in str(refused.value) and refused.value.exit_code == 2
    with pytest.raises(UserError, match="no store of kind mysql"):
        writer_of("mysql://x")
    with pytest.raises(UserError, match="there is no store at"):
        existing_store(f"lmdb://{tmp_path}/absent")
    for words in (["--versions"], ["--rollback"]):
        assert main(["export", *words, "redis://127.0.0.1:1/0"]) == 2
        assert "redis://127.0.0.1:1/0 cannot be opened: " in capsys.readouterr().err
    with pytest.raises(UserError, match=r"cannot be opened: .*; check the address") as opened:
        open_scorers(["redis://127.0.0.1:1/0"], tmp_path, at="last", trusted=[], cache_rows=0, cache_seconds=0)
    assert opened.value.exit_code == 2
    with pytest.raises(UserError, match="is a folder"):
        existing_store(str(tmp_path))
    with pytest.raises(UserError, match="cannot be used"):
        writer_of("lmdb:///dev/null/store")
    with pytest.raises(UserError, match="is not an export of a ranking model"), store_errors(str(tmp_path)):
        RowReader(str(tmp_path))
    assert shown_place("redis://h:1/0?password=secret&prefix=p") == "redis://h:1/0?prefix=p"
    assert shown_place("unix:///s?password=secret") == "unix:///s"
    assert shown_place("redis://u:secret@[x?password=secret") == "redis://[x"
    with pytest.raises(UserError, match=r"redis://\[x cannot be used"):
        writer_of("redis://u:secret@[x")
    assert shown_place("out/x") == "out/x" and shown_place("redis://h:1/0") == "redis://h:1/0"


def test_the_same_number_in_a_store_that_was_filled_again_is_another_version(redis_place: str) -> None:
    place = f"{redis_place}?prefix=again"
    loaded(writer_of(place), {1: 5.0}, {}, id="a")
    reader, client = RowReader(place, cache_rows=10, cache_seconds=600.0), RedisBackend(place).client
    assert first(reader, 1) == [5.0]
    before = reader.head
    client.delete(*client.scan_iter("again:*"))
    assert loaded(writer_of(place), {1: 6.0}, {}, id="b") == reader.version
    assert first(reader, 1) == [6.0] and reader.head != before
