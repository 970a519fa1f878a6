"""Rows of coming batches are prefetched only if reads wait for the disk."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from stoker.launch.process_pool import Pool
from stoker.sparse import DiskTier, Feature, JaggedIds, SparseEmbeddings, TableSettings
from stoker.sparse.exchanged_rows import ASK_OTHERS, ExchangedRows
from stoker.sparse.read_waits import LAST, ReadWaits
from stoker.sparse.servers import RowServers
from stoker.sparse.servers.row_server import RowServer
from stoker.sparse.table_keys import Keys
from stoker.sparse.tiered_rows import TieredRows


class Disk:
    """Page faults of a thread, set by a test."""

    def __init__(self) -> None:
        self.faults = 0

    def read(self, waits: ReadWaits, reads: int, faults: int) -> None:
        with waits.counted(reads):
            self.faults += faults


def test_what_reads_have_waited_is_forgotten_in_time() -> None:
    disk = Disk()
    waits = ReadWaits(lambda: disk.faults)
    assert not waits.often
    disk.read(waits, 1000, 10)
    assert not waits.often  # one in a hundred
    disk.read(waits, 1000, 11)
    assert waits.often
    disk.read(waits, 1000, 600)
    looks = 0
    while waits.often:  # the file is in the page cache
        disk.read(waits, LAST // 4, 0)
        looks += 1
    assert 4 < looks < 40
    disk.read(waits, 1000, 600)  # and was dropped from it
    assert waits.often


def test_faults_are_those_of_this_machine() -> None:
    waits = ReadWaits()
    with waits.counted(100):
        bytes(10**6)
    assert not waits.often


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns the number of prefetched rows of each call."""
    found: list[int] = []
    monkeypatch.setattr(TieredRows, "prefetch", lambda self, rows: found.append(len(rows)))
    return found


def test_rows_are_asked_for_where_lookups_wait(tmp_path: Path, asked: list[int]) -> None:
    disk = Disk()
    model = SparseEmbeddings([TableSettings("t", 4, disk=DiskTier(tmp_path, 10))], {"f": Feature("t")})
    source = model._fused[0].source
    assert isinstance(source, ExchangedRows) and isinstance(source.shard.store, TieredRows)
    source.shard.store._log.waits = waits = ReadWaits(lambda: disk.faults)
    batch = {"f": JaggedIds.single(torch.arange(50))}
    for _ in range(2):  # the second lookup reads rows of the file from the page cache
        model.prefetch(batch)
        model(batch)["f"].sum().backward()
        model.apply_gradients()
    model.prefetch(batch)
    assert waits._reads > 0 and not asked
    disk.read(waits, 100, 50)
    model.prefetch(batch)
    assert asked == [50]


def test_processes_ask_as_soon_as_one_of_them_waits(tmp_path: Path, pool: Pool) -> None:
    assert pool.run(asked_by_processes, str(tmp_path), world=2) == [ASK_OTHERS, ASK_OTHERS]


def asked_by_processes(folder: str) -> int:
    """Returns the number of prefetches if one of two processes begins to wait soon after the first exchange."""
    rows = ExchangedRows([TableSettings("t", 4, disk=DiskTier(Path(folder), 10))], seed=0, group=dist.group.WORLD)
    asked: list[int] = []
    rows.shard.prefetch = lambda keys: asked.append(len(keys))  # type: ignore[method-assign]
    ids = np.arange(8)
    for call in range(2 * ASK_OTHERS):
        if call == 1 and dist.get_rank() == 1:
            assert isinstance(rows.shard.store, TieredRows)
            rows.shard.store._log.waits._waits = 1
        rows.prefetch(Keys.of(ids, np.zeros(8, np.int64), rows.shard.salts))
    return len(asked)


def test_a_server_is_asked_where_its_lookups_wait(
    tmp_path: Path, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = RowServer(("127.0.0.1", 0), bytes(32), tmp_path)
    threading.Thread(target=server.serve, daemon=True).start()
    try:
        servers = RowServers((server.address,), bytes(32))
        table = TableSettings("t", 4, disk=DiskTier(tmp_path, 10))
        model = SparseEmbeddings([table], {"f": Feature("t")}, servers=servers)
        batch = {"f": JaggedIds.single(torch.arange(50))}
        for waits in (False, True):
            monkeypatch.setattr(ReadWaits, "often", waits)
            model(batch)["f"].sum().backward()  # the answer contains whether it waited
            model.apply_gradients()
            model.prefetch(batch)
            model.eval()(batch)  # after all earlier requests
            model.train()
            assert bool(asked) == waits
    finally:
        server.close()
