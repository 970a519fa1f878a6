"""Converts the rows of a shard to the form of checkpoints, by id, in parts, and loads them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from stoker.sparse.row_optimizers import OPTIMIZERS
from stoker.sparse.sparse_state import LazyColumn, LazyPart, TableState
from stoker.sparse.table_settings import TableSettings
from stoker.sparse.value_format import RowFormat

if TYPE_CHECKING:
    from stoker.sparse.table_shard import TableShard


def lazy_parts(shard: TableShard, since: int | None, rows: int | None) -> Iterator[LazyPart]:
    """Yields the rows of each table by id: all, or those that were seen in step ``since`` or later.

    Args:
        rows: maximum in each of a table's parts; None for all in one.
    """
    found = shard.index.rows
    if since is not None:
        found = found[shard.last[found] >= since]
    tables = shard.index.tables[found]
    for number, table in enumerate(shard.tables):
        mine = found[tables == number]
        mine = mine[np.argsort(shard.index.ids[mine])]
        beside = {"removed": shard.gone.since(since, number), **shard.waiting.state(number)}
        if shard.evicted[number, 0]:
            beside["evicted"] = torch.from_numpy(shard.evicted[[number]])
        for there in np.split(mine, range(rows, len(mine), rows)) if rows else [mine]:
            part = there[shard.index.tables[there] == number]  # without rows evicted since the previous part
            columns = _columns(shard, part)
            yield LazyPart(table.name, columns | {name: LazyColumn.of(tensor) for name, tensor in beside.items()})
            beside = {}


def _columns(shard: TableShard, rows: np.ndarray) -> dict[str, LazyColumn]:
    numbers: dict[str, np.ndarray] = {"ids": shard.index.ids, "seen": shard.seen, "last": shard.last}
    columns = {
        name: LazyColumn((len(rows),), torch.from_numpy(whole[:0]).dtype, partial(_chosen, whole, rows))
        for name, whole in numbers.items()
    }
    form = shard.format
    values = LazyColumn((len(rows), form.columns), form.stored, partial(shard.store.values, rows))
    optimizer = LazyColumn((len(rows), shard.state_columns), form.compute, partial(shard.store.state, rows))
    return columns | {"values": values, "optimizer": optimizer}


def _chosen(column: np.ndarray, rows: np.ndarray) -> Tensor:
    return torch.from_numpy(column[rows])


def load_table(shard: TableShard, name: str, state: TableState) -> None:
    """Loads a shard's part of a state into the present rows.

    Raises:
        ValueError: the rows do not fit the table.
    """
    number = next(i for i, table in enumerate(shard.tables) if table.name == name)
    columns = (shard.format.columns, shard.state_columns)
    if (state.values.shape[1], state.optimizer.shape[1]) != columns or state.values.dtype != shard.format.stored:
        found = f"{state.values.dtype} {tuple(state.values.shape)} with {state.optimizer.shape[1]} columns of state"
        raise ValueError(f"the rows of table {name!r} are {found}, and this job's have {columns}")
    removed = shard.owned(state.removed.numpy(), number)[0]
    rows = shard.index.find(removed.ids, removed.tables, removed.hashes)
    shard.remove(rows[rows > 0])
    keys, at = shard.owned(state.ids.numpy(), number)
    rows = shard.index.find(keys.ids, keys.tables, keys.hashes)
    absent = np.flatnonzero(rows == 0)
    rows[absent] = shard.give_rows(keys[absent])
    shard.seen[rows], shard.last[rows] = state.seen.numpy()[at], state.last.numpy()[at]
    chosen = torch.from_numpy(at)
    shard.store.write(rows, state.values[chosen], state.optimizer[chosen].to(shard.format.compute))
    shard.waiting.load(number, state)
    if len(state.evicted):
        shard.evicted[number] = state.evicted[-1].numpy()


def no_rows(table: TableSettings) -> TableState:
    """Returns a state without rows."""
    form = RowFormat(table.dtype, table.width)
    numbers = (torch.empty(0, dtype=torch.int32) for _ in range(2))
    state = torch.empty(0, OPTIMIZERS[table.optimizer].columns(table.width), dtype=form.compute)
    return TableState(
        torch.empty(0, dtype=torch.int64), torch.empty(0, form.columns, dtype=form.stored), state, *numbers
    )
