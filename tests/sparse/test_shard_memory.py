"""The predicted memory of tables is what they take."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch

from stoker.sparse.shard_memory import ShardMemory, predict_memory, row_bytes, state_bytes
from stoker.sparse.table_keys import Keys
from stoker.sparse.table_settings import Admission, DiskTier, TableSettings
from stoker.sparse.table_shard import TableShard

STEP = 500  # new ids of a step


def filled(tables: list[TableSettings], rows: int, *, rank: int = 0, world: int = 1) -> TableShard:
    """A shard with so many rows of each table, made a few at a time."""
    shard = TableShard(tables, seed=0, rank=rank, world=world)
    for begin in range(0, rows, STEP):
        ids = np.tile(np.arange(begin, min(rows, begin + STEP)), len(tables))
        numbers = np.repeat(np.arange(len(tables)), len(ids) // len(tables))
        keys = Keys.of(ids, numbers, shard.salts)
        found = shard.look_up(keys)
        shard.update(found.unique, torch.ones(len(found.unique), tables[0].width))
        shard.end_step()
    return shard


@pytest.mark.parametrize("rows", [3_000, 20_000, 70_001])
@pytest.mark.parametrize(
    "table",
    [
        TableSettings("a", 16),
        TableSettings("a", 8, optimizer="adam", dtype="float16"),
        TableSettings("a", 32, optimizer="ftrl", dtype="int8"),
        TableSettings("a", 4, optimizer="sgd", admission=Admission(probability=1.0)),
    ],
    ids=lambda table: f"{table.optimizer}, {table.dtype}",
)
def test_memory_is_as_predicted(table: TableSettings, rows: int) -> None:
    shard = filled([table], rows)
    assert len(shard.index) == rows
    wanted, taken = predict_memory([table], rows, first=STEP), shard.memory
    assert wanted.total == pytest.approx(taken.total, rel=0.1)
    for part in fields(ShardMemory):
        assert getattr(wanted, part.name) == pytest.approx(getattr(taken, part.name), rel=0.1)
    [(_, state)] = shard.state()
    saved = sum(t.nbytes for t in (state.ids, state.values, state.optimizer, state.seen, state.last))
    assert state_bytes([table], rows) == pytest.approx(saved, rel=0.1)


def test_tables_together_sketches_and_disk(tmp_path: Path) -> None:
    both = [TableSettings("a", 16), TableSettings("b", 16)]
    assert predict_memory(both, 20_000, first=2 * STEP).total == pytest.approx(
        filled(both, 10_000).memory.total, rel=0.1
    )
    table = TableSettings("a", 16, admission=Admission(count=2, cells=100_000))
    for rank in range(3):
        empty = TableShard([table], seed=0, rank=rank, world=3).memory
        assert (
            predict_memory([table], 0, world=3).sketches == pytest.approx(empty.sketches, rel=0.01) and empty.sketches
        )
    tiered = TableSettings("a", 16, disk=DiskTier(tmp_path, 5_000))
    shard = filled([tiered], 30_000).memory
    wanted = predict_memory([tiered], 30_000, first=STEP)
    assert wanted.total == pytest.approx(shard.total, rel=0.1)
    assert wanted.file == 25_000 * row_bytes(tiered) <= shard.file
