"""Tables with rows on servers in this process, their batches, and the comparison of states."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from stoker.sparse import Admission, Eviction, Feature, JaggedIds, SparseEmbeddings, TableSettings
from stoker.sparse.servers import RowServers
from stoker.sparse.servers.row_server import RowServer
from stoker.sparse.sparse_state import SparseState

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
    losses: list[float] | None = None,
) -> tuple[list[float], SparseState]:
    rank, world = (dist.get_rank(), dist.get_world_size()) if group else (0, 1)
    tables = SparseEmbeddings([USERS, ITEMS, WORDS], FEATURES, seed=3, group=group, servers=servers)
    if parts:
        tables.load(parts)
    losses = [] if losses is None else losses
    for step in steps:
        pooled = tables(batch_of(step, rank, world))
        loss = torch.cat([pooled[name].flatten(1) for name in FEATURES], dim=1).sum(1).sin().sum()
        loss.backward()
        if step % 4 == 3:
            tables.discard()
        else:
            assert tables.gradients_are_finite()
            tables.apply_gradients(scale=0.5, lr_factor=1 / (1 + step))
        losses.append(loss.item())
        time.sleep(pause)
    return losses, tables.state()


def on_a_rank(servers: RowServers | None, steps: range, parts: list[SparseState]) -> tuple[list[float], SparseState]:
    return trained(servers, steps, parts, group=dist.group.WORLD)


@contextmanager
def serving(
    *folders: Path, ports: tuple[int, ...] = (), every: int = 3
) -> Iterator[tuple[RowServers, list[RowServer]]]:
    """Runs servers in threads of this process."""
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


def restart(running: list[RowServer], number: int, folder: Path, every: int = 3) -> None:
    """Restarts a server at the same address, as after it was killed."""
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
