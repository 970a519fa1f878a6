"""The rows that one process owns of tables with one layout: lookup, update, admission, eviction, state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from stoker.sparse.hashing import hashes_of, mix64, owners_of, salt_of, uniform
from stoker.sparse.id_index import IdIndex, grown
from stoker.sparse.keys import Keys
from stoker.sparse.memory_rows import MemoryRows
from stoker.sparse.row_format import RowFormat
from stoker.sparse.row_optimizers import OPTIMIZERS
from stoker.sparse.shard_memory import ShardMemory
from stoker.sparse.sparse_state import LazyColumn, LazyPart, TableState
from stoker.sparse.table_settings import TableSettings
from stoker.sparse.tiered_rows import TieredRows
from stoker.sparse.waiting_ids import WaitingIds


@dataclass(frozen=True)
class Rows:
    """What keys were found at.

    Attributes:
        unique: int64 [u], row numbers in order of their last key, each once; 0 is the default row.
        inverse: int64 [n], for each key its place in ``unique``.
    """

    unique: np.ndarray
    inverse: np.ndarray


class TableShard:
    """Rows of several tables, in one index and one store.

    Args:
        tables: with the same ``layout``; keys name them by their place here.
        rank, world: keys of other owners must not be looked up here.

    Attributes:
        step: steps that have ended.
    """

    def __init__(self, tables: Sequence[TableSettings], *, seed: int, rank: int = 0, world: int = 1) -> None:
        assert len({table.layout for table in tables}) == 1
        self.tables, self._settings, self._rank, self._world = tuple(tables), tables[0], rank, world
        self.salts = np.array([salt_of("index", table.name) for table in tables])
        self._value_salts = np.array([salt_of("first values", seed, table.name) for table in tables])
        self._seed = seed
        self.index = IdIndex(self.salts)
        self.format = RowFormat(self._settings.dtype, self._settings.width)
        self._optimizer = OPTIMIZERS[self._settings.optimizer]
        columns = self._optimizer.columns(self._settings.width)
        shape = (self.format.columns, self.format.stored, columns, self.format.compute)
        disk = self._settings.disk
        self.store: MemoryRows | TieredRows = TieredRows(*shape, disk) if disk else MemoryRows(*shape)
        self._last, self._seen = np.zeros(1024, np.int32), np.zeros(1024, np.int32)
        self._numbers = np.zeros(1024, np.int32)
        self._scales = np.array([table.init_scale for table in tables])
        self._waiting = WaitingIds(tables, seed=seed, rank=rank, world=world)
        self._made: list[np.ndarray] = []  # rows that lookups of this step have made
        self._touched: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # rows, last seen before, occurrences
        self._removed: list[tuple[int, Keys]] = []  # evicted since the earliest of the bases: the step, and what
        self._bases: dict[str, int] = {}  # the steps from which on incremental states are asked for, by who asks
        self.step = 0

    @property
    def memory(self) -> ShardMemory:
        """What it takes."""
        store = self.store
        return ShardMemory(
            store.bytes,
            self.index.bytes,
            self._last.nbytes + self._seen.nbytes + self._numbers.nbytes,
            self._waiting.bytes,
            store.file_bytes if isinstance(store, TieredRows) else 0,
        )

    # -- lookup and update ---------------------------------------------------------------------------------------

    def look_up(self, keys: Keys, counts: np.ndarray | None = None) -> Rows:
        """Finds rows for training: new ids get them where every id is admitted, and all are counted.

        Args:
            keys: [n], in any number of repetitions.
            counts: int64 [n], occurrences that each key stands for; one each by default.
        """
        rows = self.index.find(keys.ids, keys.tables, keys.hashes)
        absent = np.flatnonzero(rows == 0)
        if len(absent):
            new = self._waiting.admits_all[keys.tables[absent]]
            enter, wait = absent[new], absent[~new]
            self._waiting.see(keys[wait], np.ones(len(wait), np.int64) if counts is None else counts[wait])
            rows[enter] = self._insert(keys[enter])
            self._made.append(rows[enter])
        found = self._unique(rows)
        sums = np.bincount(found.inverse, counts, len(found.unique)).astype(np.int32)
        self._touched.append((found.unique, self._last[found.unique], sums))
        self._last[found.unique] = self.step
        self._seen[found.unique] += sums
        return found

    def peek(self, keys: Keys) -> Rows:
        """Finds rows for evaluation: nothing changes."""
        return self._unique(self.index.find(keys.ids, keys.tables, keys.hashes))

    def has_rows(self, keys: Keys) -> np.ndarray:
        """Which keys have rows of their own, or get them when they are looked up. bool [n]."""
        return self._waiting.admits_all[keys.tables] | (self.index.find(keys.ids, keys.tables, keys.hashes) > 0)

    def preview(self, keys: Keys) -> Tensor:
        """Values [n, width] that `look_up` would give, while nothing changes."""
        rows = self.index.find(keys.ids, keys.tables, keys.hashes)
        values = self.values(rows)
        new = np.flatnonzero((rows == 0) & self._waiting.admits_all[keys.tables])
        if len(new):
            first = self._first(keys.ids[new], keys.tables[new])
            values[torch.from_numpy(new)] = self.format.decode(self.format.encode(first))
        return values

    def values(self, rows: np.ndarray) -> Tensor:
        """Values [n, width] of rows, in the type of arithmetic; those of the default row are 0."""
        return self.format.decode(self.store.values(rows))

    def update(self, rows: np.ndarray, grads: Tensor, *, lr_factor: float = 1.0, values: Tensor | None = None) -> None:
        """Applies the optimizer.

        Args:
            rows: int64 [n], each once; the default row is left as it is.
            grads: [n, width], sums over all occurrences of each row's id.
            values: what `values` gave for these rows, if nothing has been updated since; they are overwritten.
        """
        if len(default := np.flatnonzero(rows == 0)):
            kept = np.delete(np.arange(len(rows)), default)
            rows, grads, values = rows[kept], grads[torch.from_numpy(kept)], None
        if not len(rows):
            return
        values = self.values(rows) if values is None else values
        state = self.store.state(rows)
        if self._settings.weight_decay:
            grads = grads.add(values, alpha=self._settings.weight_decay)
        self._optimizer.step(values, state, grads, self._settings, self._settings.lr * lr_factor)
        noise = None
        if self.format.rounds:
            salt = salt_of("rounding", self._seed, self.step)
            hashes = self._hashes(rows, self._value_salts)
            noise = uniform(mix64(hashes + salt), self._settings.width)
        self.store.write(rows, self.format.encode(values, noise), state)

    def sum_by_row(self, rows: np.ndarray, grads: Tensor) -> tuple[np.ndarray, Tensor]:
        """Rows, each once, and the sum of the gradients of each."""
        found = self._unique(rows)
        total = grads.new_zeros(len(found.unique), grads.shape[1])
        return found.unique, total.index_add_(0, torch.from_numpy(found.inverse), grads)

    def end_step(self) -> None:
        """Admits ids that were seen in this step, counts the step, and evicts rows."""
        if (admitted := self._waiting.admitted(self.step)) is not None:
            keys, counts = admitted
            rows = self._insert(keys)
            self._seen[rows] = counts
        self._made.clear()
        self._touched.clear()
        self.step += 1
        if any(table.eviction and self.step % table.eviction.every == 0 for table in self.tables):
            self._evict()

    def undo_step(self) -> None:
        """Forgets this step's lookups, the rows that they made and what they counted. The step has not ended."""
        for rows, last, sums in reversed(self._touched):
            self._seen[rows] -= sums
            self._last[rows] = last
        self._touched.clear()
        self._waiting.forget()
        if self._made:
            made = np.unique(np.concatenate(self._made))
            self._made.clear()
            self.index.remove(made)
            self.store.free(made)

    def _unique(self, rows: np.ndarray) -> Rows:
        """In linear time: each row remembers its last place among these."""
        places = np.arange(len(rows), dtype=np.int32)
        self._numbers[rows] = places  # of several the last assignment stays
        last = np.take(self._numbers, rows)
        is_last = last == places
        numbers = np.cumsum(is_last) - 1
        return Rows(rows[is_last], np.take(numbers, last))

    def _hashes(self, rows: np.ndarray, salts: np.ndarray) -> np.ndarray:
        return hashes_of(self.index.ids[rows], salts[self.index.tables[rows]])

    def prefetch(self, keys: Keys) -> None:
        """Begins to bring rows that lie in a file; nothing changes."""
        if isinstance(self.store, TieredRows):
            rows = self._unique(self.index.find(keys.ids, keys.tables, keys.hashes)).unique
            self.store.prefetch(rows[rows > 0])

    # -- rows that come and go ---------------------------------------------------------------------------------------

    def _insert(self, keys: Keys) -> np.ndarray:
        """Rows of ids that have none, with their first values. int64 [n]."""
        rows = self._give_rows(keys)
        new = self._unique(rows).unique
        if len(new):
            values = self._first(self.index.ids[new], self.index.tables[new])
            self._last[new], self._seen[new] = self.step, 0
            self.store.write(new, self.format.encode(values), self._optimizer.first(values, self._settings))
        return rows

    def _first(self, ids: np.ndarray, tables: np.ndarray) -> Tensor:
        """First values. [n, width]."""
        draws = uniform(hashes_of(ids, self._value_salts[tables]), self._settings.width)
        return torch.from_numpy((draws * 2 - 1) * self._scales[tables][:, None]).to(self.format.compute)

    def _give_rows(self, keys: Keys) -> np.ndarray:
        rows = self.index.insert(keys.ids, keys.tables, keys.hashes)
        size = len(self.index.ids)
        if size > len(self._last):
            self._last, self._seen, self._numbers = (grown(x, size) for x in (self._last, self._seen, self._numbers))
        self.store.reserve(self.index.top)
        return rows

    def _evict(self) -> None:
        rows = self.index.rows
        tables = self.index.tables[rows]
        for number, table in enumerate(self.tables):
            rule = table.eviction
            if rule is None or self.step % rule.every:
                continue
            mine = rows[tables == number]
            mine = mine[self.step - 1 - self._last[mine] >= rule.age]
            if rule.frequency is not None:
                mine = mine[self._seen[mine] < rule.frequency]
            if rule.norm is not None:
                mine = mine[self.values(mine).norm(dim=1).numpy() < rule.norm]
            self._remove(mine)

    def _remove(self, rows: np.ndarray) -> None:
        if len(rows):
            ids, tables = self.index.ids[rows], self.index.tables[rows].astype(np.int64)
            if self._bases:
                self._removed.append((self.step - 1, Keys.of(ids, tables, self.salts)))
            self.index.remove(rows)
            self.store.free(rows)

    # -- state -----------------------------------------------------------------------------------------------------

    def state(
        self, since: int | None = None, *, rows: int | None = None, is_base: bool = True
    ) -> Iterator[tuple[str, TableState]]:
        """Rows of each table by id: all, or those that were seen in step ``since`` or later.

        Evicted ids are recorded from one whole state to the next, for the incremental states between them.

        Steps may be taken between two parts. Then a part has the rows of its ids as they are when it is asked for, and
        an incremental state since the beginning has what the parts lack.

        Args:
            rows: at most, in each of a table's parts; all in one by default.
            is_base: whether incremental states may follow this one, where it is a whole one.

        Raises:
            ValueError: ``since`` is before the last whole state.
        """
        for part in self.lazy_parts(since, rows=rows, is_base=is_base):
            yield part.table, part.state()

    def lazy_parts(
        self, since: int | None = None, *, rows: int | None = None, is_base: bool = True
    ) -> Iterator[LazyPart]:
        """As `state`, in parts whose rows are copied when they are asked for; no step may be taken before that."""
        if since is None and is_base:
            self.rebase(self.step)
        first = min(self._bases.values(), default=None)
        if since is not None and (first is None or since < first):
            last = "there has been none" if first is None else f"that was at {first}"
            raise ValueError(f"a state since {since} wants a whole one at that version or before: {last}")
        found = self.index.rows
        if since is not None:
            found = found[self._last[found] >= since]
        tables = self.index.tables[found]
        for number, table in enumerate(self.tables):
            mine = found[tables == number]
            mine = mine[np.argsort(self.index.ids[mine])]
            beside = {"removed": self._gone(number, since), **self._waiting.state(number)}
            for there in np.split(mine, range(rows, len(mine), rows)) if rows else [mine]:
                part = there[self.index.tables[there] == number]  # others may have gone since the part before
                columns = self._columns(part)
                yield LazyPart(table.name, columns | {name: LazyColumn.of(tensor) for name, tensor in beside.items()})
                beside = {}

    def _columns(self, rows: np.ndarray) -> dict[str, LazyColumn]:
        numbers: dict[str, np.ndarray] = {"ids": self.index.ids, "seen": self._seen, "last": self._last}
        columns = {
            name: LazyColumn((len(rows),), torch.from_numpy(whole[:0]).dtype, partial(_chosen, whole, rows))
            for name, whole in numbers.items()
        }
        state = self._optimizer.columns(self._settings.width)
        values = LazyColumn((len(rows), self.format.columns), self.format.stored, partial(self.store.values, rows))
        optimizer = LazyColumn((len(rows), state), self.format.compute, partial(self.store.state, rows))
        return columns | {"values": values, "optimizer": optimizer}

    def rebase(self, step: int | None, *, by: str = "") -> None:
        """Says that an asker's incremental states reach back to ``step``, or that there will be none.

        Evicted ids of steps before that of every asker are forgotten.
        """
        self._bases = {name: at for name, at in {**self._bases, by: step}.items() if at is not None}
        first = min(self._bases.values(), default=self.step)
        self._removed = [(when, keys) for when, keys in self._removed if when >= first]

    def _gone(self, number: int, since: int | None) -> Tensor:
        found = [np.empty(0, np.int64)]
        if since is not None:
            found += [keys.ids[keys.tables == number] for step, keys in self._removed if step >= since]
        return torch.from_numpy(np.unique(np.concatenate(found)))

    def counts(self) -> dict[str, int]:
        """Rows of each table."""
        tables = self.index.tables[: self.index.top]
        return {table.name: int((tables == number).sum()) for number, table in enumerate(self.tables)}

    def load(self, name: str, state: TableState, *, step: int) -> None:
        """Takes over this process' part of a state, on top of what is there.

        Raises:
            ValueError: the rows do not fit the table.
        """
        number = next(i for i, table in enumerate(self.tables) if table.name == name)
        self.step, self._bases, self._removed = step, {"": step}, []
        columns = (self.format.columns, self._optimizer.columns(self._settings.width))
        if (state.values.shape[1], state.optimizer.shape[1]) != columns or state.values.dtype != self.format.stored:
            found = f"{state.values.dtype} {tuple(state.values.shape)} with {state.optimizer.shape[1]} columns of state"
            raise ValueError(f"the rows of table {name!r} are {found}, and this job's have {columns}")
        removed = self._mine(state.removed.numpy(), number)[0]
        rows = self.index.find(removed.ids, removed.tables, removed.hashes)
        rows = rows[rows > 0]
        if len(rows):
            self.index.remove(rows)
            self.store.free(rows)
        keys, at = self._mine(state.ids.numpy(), number)
        rows = self.index.find(keys.ids, keys.tables, keys.hashes)
        absent = np.flatnonzero(rows == 0)
        rows[absent] = self._give_rows(keys[absent])
        self._seen[rows], self._last[rows] = state.seen.numpy()[at], state.last.numpy()[at]
        chosen = torch.from_numpy(at)
        self.store.write(rows, state.values[chosen], state.optimizer[chosen].to(self.format.compute))
        self._waiting.load(number, state)

    def _mine(self, ids: np.ndarray, number: int) -> tuple[Keys, np.ndarray]:
        """The keys of a table that this process owns, and where they are among these ids."""
        keys = Keys.of(np.ascontiguousarray(ids), np.full(len(ids), number), self.salts)
        at = np.flatnonzero(owners_of(keys.hashes, self._world) == self._rank)
        return keys[at], at


def _chosen(column: np.ndarray, rows: np.ndarray) -> Tensor:
    return torch.from_numpy(column[rows])
