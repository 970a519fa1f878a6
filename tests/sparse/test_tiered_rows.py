"""Rows partly on disk against rows in memory."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stoker.errors import DiskFailed, UserError
from stoker.sparse import DiskTier, Eviction, Feature, JaggedIds, SparseEmbeddings, TableSettings
from stoker.sparse.memory_rows import MemoryRows
from stoker.sparse.read_waits import ReadWaits
from stoker.sparse.row_log import RowLog
from stoker.sparse.sparse_state import SparseState
from stoker.sparse.tiered_rows import TieredRows

ROWS = st.lists(st.integers(1, 30), max_size=12, unique=True)
OPERATIONS = st.lists(st.tuples(st.sampled_from(["write", "free", "prefetch"]), ROWS), max_size=25)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with TemporaryDirectory() as name:
        yield Path(name)


@settings(max_examples=60, deadline=None)
@example(operations=[("write", [1, 2]), ("write", [3])], most=2, state_columns=1)  # a single row comes from the file
@example(  # several rows leave memory at a time, none of those that are being written
    operations=[("write", list(range(1, 33))), ("write", list(range(2, 34)))], most=32, state_columns=1
)
@given(operations=OPERATIONS, most=st.integers(1, 20), state_columns=st.integers(0, 2))
def test_they_hold_what_memory_holds(
    folder: Path, operations: list[tuple[str, list[int]]], most: int, state_columns: int
) -> None:
    shape = (3, torch.float16, state_columns, torch.float32)
    memory, tiered = MemoryRows(*shape), TieredRows(*shape, DiskTier(folder, most))
    there, written = set[int](), 0
    for store in (memory, tiered):
        store.reserve(34)
    for kind, chosen in operations:
        rows = np.array([row for row in chosen if kind == "write" or row in there], np.int64)
        if kind == "write":
            written += 1
            values = torch.arange(len(rows) * 3).view(-1, 3).to(torch.float16) + written
            state = torch.full((len(rows), state_columns), float(written))
            for store in (memory, tiered):
                store.write(rows, values, state)
            there |= set(rows.tolist())
        elif kind == "free":
            for store in (memory, tiered):
                store.free(rows)
            there -= set(rows.tolist())
        else:
            tiered.prefetch(rows)
        asked = np.array([0, *sorted(there), *sorted(there)[:3]])
        assert torch.equal(tiered.values(asked), memory.values(asked))
        assert torch.equal(tiered.state(asked), memory.state(asked))
        assert int((tiered._rows > 0).sum()) <= most


def test_no_request_is_dropped_while_another_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touched, going_on = list[int](), Event()

    def touch(log: RowLog, rows: np.ndarray) -> None:
        going_on.wait(10)
        touched.extend(rows.tolist())

    monkeypatch.setattr(RowLog, "touch", touch)
    tiered = TieredRows(1, torch.float32, 0, torch.float32, DiskTier(folder, 10))
    tiered.reserve(101)
    tiered.write(np.arange(1, 101), torch.zeros(100, 1), torch.zeros(100, 0))
    cold = np.flatnonzero(tiered._slots[1:101] < 0) + 1
    for part in np.split(cold, 3):
        tiered.prefetch(part)
    going_on.set()
    assert tiered._threads is not None
    tiered._threads.shutdown()
    assert len(cold) == 90 and sorted(touched) == cold.tolist()


def test_the_file_does_not_grow_without_end(folder: Path) -> None:
    log = RowLog(folder, 8)
    rows = np.arange(1, 5001)
    for number in range(50):
        log.append(rows, np.full((5000, 8), number, np.uint8))
        assert (log.read(rows) == number).all()
        log.drop(rows[:4900] if number % 2 else rows)
        if number % 2:
            assert (log.read(rows[4900:]) == number).all()
            log.drop(rows[4900:])
    assert log.file_bytes <= 5 * 5000 * 8
    assert not any(folder.iterdir())  # the file has no name


def test_rows_come_in_any_number_at_once(folder: Path) -> None:
    log, rows = RowLog(folder, 8), np.arange(40_000)
    records = rows[:, None].view(np.uint8)
    for part in (slice(0, 4000), slice(4000, 40_000)):
        log.append(rows[part], records[part])
    assert np.array_equal(log.read(rows), records)


def test_freed_rows_leave_room_in_the_file(folder: Path) -> None:
    tiered = TieredRows(2, torch.float32, 0, torch.float32, DiskTier(folder, 8))
    tiered.reserve(20_001)
    for first in range(1, 20_000, 4000):
        rows = np.arange(first, first + 4000)
        tiered.write(rows, torch.ones(len(rows), 2), torch.empty(len(rows), 0))
        tiered.free(rows)
    assert tiered.file_bytes <= 2 * 4000 * 8  # of one round, and as many dead records


def test_the_blocks_of_the_file_are_reserved(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write to a mapped page for which the disk has no block would kill the process."""
    log = RowLog(folder, 64)
    assert os.fstat(log._file.fileno()).st_blocks * 512 >= 4096 * 64

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DiskFailed, match=r"has no room for the rows of a table: .*No space left"):
        log.append(np.arange(1, 5001), np.zeros((5000, 64), np.uint8))


def test_rows_that_the_file_never_had_are_dropped_and_loaded_as_nothing(folder: Path) -> None:
    log = RowLog(folder, 8)
    log.append(np.array([3]), np.ones((1, 8), np.uint8))
    log.drop(np.array([2, 5000]))
    log.touch(np.array([2, 3, 5000]))
    assert log.read(np.array([3])).all()


def test_the_least_recently_written_rows_leave_memory(folder: Path) -> None:
    tiered = TieredRows(1, torch.float32, 0, torch.float32, DiskTier(folder, 10))
    tiered.reserve(20)
    for row in (*range(1, 11), 1, 2, 11, 12):
        tiered.write(np.array([row]), torch.zeros(1, 1), torch.zeros(1, 0))
    assert np.flatnonzero(tiered._slots[1:13] < 0).tolist() == [2, 3]  # rows 3 and 4


def test_records_of_rows_that_are_in_memory_again_are_dead(folder: Path) -> None:
    tiered = TieredRows(2, torch.float32, 0, torch.float32, DiskTier(folder, 64))
    tiered.reserve(129)
    for step in range(200):  # each half pushes the other out
        tiered.write(np.arange(1, 65) + 64 * (step % 2), torch.zeros(64, 2), torch.zeros(64, 0))
    assert 0 < tiered.file_bytes <= 4096 * 8


def test_batches_are_known_by_their_ids_whatever_their_order(folder: Path) -> None:
    table = TableSettings("t", 4, optimizer="sgd", init_scale=1.0)
    features = {"f": Feature("t"), "g": Feature("t")}
    plain = SparseEmbeddings([table], features, seed=2)
    tiered = SparseEmbeddings([replace(table, disk=DiskTier(folder, 60))], features, seed=2)
    batches = [batch_of(step) for step in range(3)]
    tiered.prefetch(batches[0], batches[1])
    for batch in (batches[1], batches[2], batches[0], {**batches[0], "g": batches[1]["g"]}):
        assert all(
            torch.equal(one, other) for one, other in zip(plain(batch).values(), tiered(batch).values(), strict=True)
        )


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file/rows"):
        RowLog(tmp_path / "file/rows", 8)


def batch_of(step: int) -> dict[str, JaggedIds]:
    random = np.random.default_rng(step)
    ids = torch.from_numpy(random.zipf(1.3, 200) % 5000)
    return {"f": JaggedIds.single(ids), "g": JaggedIds.single(ids + 7)}


def trained(table: TableSettings, *, prefetch: bool = False) -> tuple[list[float], SparseEmbeddings]:
    other = replace(table, name="u")
    model = SparseEmbeddings([table, other], {"f": Feature("t"), "g": Feature("u")}, seed=2)
    losses = []
    following: dict[str, JaggedIds] | None = None
    for step in range(40):
        batch = following or batch_of(step)
        following = batch_of(step + 1) if prefetch else None
        if following is not None and step % 3:  # before and after the lookup, and once not at all
            model.prefetch(following)
        pooled = model(batch if step % 7 else batch_of(step))
        if following is not None and step % 3 == 2:
            model.prefetch(following)
        loss = (pooled["f"] * pooled["g"]).sin().sum()
        loss.backward()
        model.apply_gradients()
        losses.append(loss.item())
    return losses, model


@pytest.mark.parametrize("dtype", ["float64", "float16", "int8"])
@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adam", "sgd"])
def test_training_is_the_same_to_the_bit(
    folder: Path, optimizer: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReadWaits, "often", True)  # rows are asked for
    table = TableSettings("t", 4, optimizer=optimizer, dtype=dtype, init_scale=1.0, eviction=Eviction(age=9, every=4))
    losses, model = trained(table)
    on_disk, tiered = trained(replace(table, disk=DiskTier(folder, 60)), prefetch=True)
    assert sum(tiered.rows.values()) > 4 * 60
    assert losses == on_disk
    expected, parts = model.state(), list(tiered.parts(rows=50))
    assert len(parts) > 4
    for name, table_state in expected.tables.items():
        for column in ("ids", "values", "optimizer", "seen", "last"):
            found = torch.cat([getattr(part.tables[name], column) for part in parts if name in part.tables])
            assert torch.equal(found, getattr(table_state, column))


def test_a_state_in_parts_is_loaded_as_a_whole_one(folder: Path) -> None:
    table = TableSettings("t", 4, eviction=Eviction(age=9, every=4), disk=DiskTier(folder, 60))
    _, model = trained(table)
    again = SparseEmbeddings([table, replace(table, name="u")], {}, seed=2)
    again.load(SparseState.from_tensors(part.tensors()) for part in model.parts(rows=50))
    expected, found = model.state(), again.state()
    assert found.step == expected.step
    for name, table_state in expected.tables.items():
        for column in ("ids", "values", "optimizer", "seen", "last"):
            assert torch.equal(getattr(found.tables[name], column), getattr(table_state, column))
