"""Rows in checkpoints: in parts, by any number of processes, without a copy of a whole table in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from click_logs import ranking_job
from running import write_job

from stoker.checkpoint.chunks import DeferredChunk
from stoker.checkpoint.dcp_store import Store
from stoker.checkpoint.rows_by_id import rows_by_id
from stoker.checkpoint.state import DamagedError, State
from stoker.checkpoint.storage import BASE
from stoker.checkpoint.tensor_names import ROWS
from stoker.errors import RunFailed, UserError
from stoker.job.load_job import load_job
from stoker.launch.process_pool import Pool
from stoker.sparse import Admission, Eviction, Feature, JaggedIds, SparseEmbeddings, TableSettings
from stoker.sparse.sparse_state import SparseState, TableState
from stoker.train.ranking import saved_tables
from stoker.train.ranking.saved_tables import ArrivingRows, SavedTables

SETTINGS = [
    TableSettings("a", 3, lr=0.1, optimizer="adam", eviction=Eviction(age=3, every=1)),
    TableSettings("b/c", 2, lr=0.1, optimizer="sgd", dtype="int8", admission=Admission(count=2, cells=64)),
]


def tables_of(group: Any = None) -> SparseEmbeddings:
    return SparseEmbeddings(SETTINGS, {"x": Feature("a"), "y": Feature("b/c")}, group=group)


class Training:
    """What saved tables see of a ranking task."""

    def __init__(self, group: Any = None, full_every: int = 1) -> None:
        self.tables = tables_of(group)
        self.before_pause: Callable[[str], None] = lambda kind: None
        self.saved = SavedTables(self, lambda: tables_of(group), full_every)  # type: ignore[arg-type]

    def ids(self) -> dict[str, set[int]]:
        return {name: set(table.ids.tolist()) for name, table in self.tables.state(is_base=False).tables.items()}

    def step(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        ids = [JaggedIds.single(torch.from_numpy(random.integers(-30, 30, 12))) for _ in "xy"]
        sum(rows.square().sum() + rows.sum() for rows in self.tables({"x": ids[0], "y": ids[1]}).values()).backward()
        self.tables.apply_gradients()


def assert_same_rows(one: SparseState, other: SparseState) -> None:
    assert one.step == other.step and one.tables.keys() == other.tables.keys()
    for name, table in one.tables.items():
        for column in ("ids", "values", "optimizer", "seen", "last", "buckets", "sketch"):
            assert torch.equal(getattr(table, column), getattr(other.tables[name], column)), (name, column)


def save_and_restore(folder: str, part_bytes: int) -> SparseState | None:
    """Saves after some steps, restores what is in the folder otherwise; the rows of this process."""
    saved_tables.PART_BYTES = part_bytes
    store = Store(Path(folder))
    task = Training(dist.group.WORLD if dist.is_initialized() else None)
    if not store.steps():
        for step in range(8):
            task.step(10 * step + (dist.get_rank() if dist.is_initialized() else 0))
        store.save(State(8, task.saved.now(8, None), {}))
    else:
        store.restore(8, task.saved.places)
        task.saved.restored()
    return task.tables.state(is_base=False)


@pytest.mark.parametrize("part_bytes", [1, 200, 1 << 20])
@pytest.mark.slow
def test_parts_that_two_processes_save_are_read_by_one_and_three(part_bytes: int, pool: Pool, tmp_path: Path) -> None:
    def joined(states: list[SparseState]) -> SparseState:
        tables = {name: TableState.joined([state.tables[name] for state in states]) for name in states[0].tables}
        order = {name: table.buckets.argsort() for name, table in tables.items()}
        sorted_ = {
            name: TableState(
                *(table.ids, table.values, table.optimizer, table.seen, table.last, table.removed),
                table.buckets[order[name]],
                table.sketch[order[name]],
            )
            for name, table in tables.items()
        }
        return SparseState(states[0].step, None, sorted_)

    written = joined(pool.run(save_and_restore, str(tmp_path), part_bytes, world=2))
    assert len(written.tables["a"].ids) > 10 and len(written.tables["b/c"].ids) > 5
    names = {name.split("/")[2] for name in Store(tmp_path).load(8).tensors if name.startswith(ROWS)}
    assert len(names) == 4 if part_bytes == 1 << 20 else len(names) > 8
    for world in (1, 3):
        assert_same_rows(joined(pool.run(save_and_restore, str(tmp_path), part_bytes, world=world)), written)


def test_a_part_has_memory_only_while_it_is_written_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_tables, "PART_BYTES", 200)
    task = Training()
    for step in range(6):
        task.step(step)
    held = task.saved.now(8, None)
    deferred = [chunk for chunks in held.values() for chunk in chunks if isinstance(chunk, DeferredChunk)]
    assert len(deferred) == len(held) - 1 > 20 and all(chunk.tensor.is_meta for chunk in deferred)
    Store(tmp_path).save(State(6, held, {}))
    again, put = Training(), []
    original = again.tables.put
    monkeypatch.setattr(again.tables, "put", lambda part: (put.append(part), original(part)))
    Store(tmp_path).restore(6, again.saved.places)
    again.saved.restored()
    parts = [table for part in put[:-1] for table in part.tables.values()]
    assert len(parts) > 8 and max(len(table.ids) for table in parts) <= 200 // 22
    assert_same_rows(again.tables.state(is_base=False), task.tables.state(is_base=False))


@pytest.mark.parametrize("part_bytes", [200, 1 << 20])
def test_increments_and_their_base_are_the_rows_to_the_bit(
    part_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved_tables, "PART_BYTES", part_bytes)
    task, store, rows = Training(full_every=3), Store(tmp_path), {}
    follower, followed = 0, task.ids()  # another asker, whose changes must not be lost
    for step in range(1, 25):
        task.step(step)
        if step % 2 == 0:
            held = task.saved.now(step, lambda base: base in store.steps() and store.is_whole(base))
            store.save(State(step, held, {} if task.saved.base is None else {BASE: task.saved.base}))
            rows[step] = task.tables.state(is_base=False)
            if step == 16:
                store.storage.delete(14)  # a base that was never written: the next one has all rows
        if step % 5 == 0:
            if follower:
                now = task.ids()
                for table, state in task.tables.state(since=follower).tables.items():
                    assert followed[table] - now[table] <= set(state.removed.tolist())
                    assert now[table] - followed[table] <= set(state.ids.tolist())
            follower, followed = task.tables.version, task.ids()
            task.tables.rebase(follower, by="export.sync")
    bases = {step: store.numbers(step).get(BASE) for step in store.steps()}
    assert bases == {2: None, 4: 2, 6: 2, 8: None, 10: 8, 12: 8, 16: 14, 18: None, 20: 18, 22: 18, 24: None}
    removed = [t for step in (4, 6) for n, t in store.load(step).tensors.items() if n.endswith("/removed")]
    assert sum(len(ids) for ids in removed) > 3  # type: ignore[misc]
    for step in set(bases) - {16}:
        again = Training()
        store.restore(step, again.saved.places)
        again.saved.restored()
        assert_same_rows(again.tables.state(is_base=False), rows[step])
        found = rows_by_id({n: t for n, t in store.load(step).tensors.items() if isinstance(t, torch.Tensor)})
        assert torch.equal(found["a/values"], rows[step].tables["a"].values)
        assert torch.equal(found["b/c/ids"], rows[step].tables["b/c"].ids)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (SETTINGS[:1], "it has rows of table 'b/c'"),
        ([replace(SETTINGS[0], width=4), SETTINGS[1]], "of table 'a' are [37] numbers a row, and this job's [49]"),
        ([replace(SETTINGS[0], dtype="float16"), SETTINGS[1]], "are torch.float32, and this job's torch.float16"),
    ],
)
def test_rows_of_other_tables_are_no_damage(settings: list[TableSettings], says: str, tmp_path: Path) -> None:
    task, store = Training(), Store(tmp_path)
    for step in range(3):
        task.step(step)
    store.save(State(3, task.saved.now(3, None), {}))
    other = SparseEmbeddings(settings, {"x": Feature("a")})
    with pytest.raises(RunFailed, match=says) as error:
        store.restore(3, ArrivingRows(other).places)
    assert not isinstance(error.value, DamagedError)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"task": "module"}, "is about rows of tables, and `task: module` has none"),
    ],
)
def test_increments_are_of_tables_in_the_processes_that_train(
    changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    job = ranking_job(checkpoint={"full_every": 3}, **changes)
    if job["task"] == "module":
        job = {
            "task": "module",
            "module": {"model": "m:n", "loss": "m:n", "data": "m:n"},
            "steps": 1,
            "checkpoint": job["checkpoint"],
        }
    with pytest.raises(UserError, match=says) as error:
        load_job(write_job(tmp_path, job))
    assert "job.yaml:" in str(error.value)
