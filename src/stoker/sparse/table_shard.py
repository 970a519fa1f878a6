"""The rows that one process owns of tables with one layout: lookup, update, admission, eviction, state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from stoker.sparse.admission import WaitingIds
from stoker.sparse.evicted_ids import EvictedIds
from stoker.sparse.eviction_pass import Candidates, EvictionPlan
from stoker.sparse.hashing import hashes_of, owners_of, salt_of, uniform
from stoker.sparse.id_index import IdIndex, lengthened_copy
from stoker.sparse.kernels import kernels
from stoker.sparse.memory_rows import MemoryRows
from stoker.sparse.row_optimizers import OPTIMIZERS
from stoker.sparse.shard_memory import ShardMemory
from stoker.sparse.shard_state import lazy_parts, load_table
from stoker.sparse.sparse_state import LazyPart, TableState
from stoker.sparse.table_keys import Keys, Rows, salts_of
from stoker.sparse.table_settings import TableSettings
from stoker.sparse.tiered_rows import TieredRows
from stoker.sparse.value_format import RowFormat
from stoker.splitmix64 import mix64

MOST_SEEN = np.iinfo(np.int32).max  # occurrences of a row are counted up to here: a gender may have more in a day


class TableShard:
    """Rows of several tables, in one index and one store.

    Args:
        tables: tables with the same ``layout``; keys refer to them by index.
        rank, world: this shard's rank among ``world``; only keys that it owns may be looked up.

    Attributes:
        step: number of completed steps.
        gone: evicted ids, for incremental states.
        waiting: ids without a row.
        state_columns: number of elements of a row's optimizer state.
        last, seen: int32, by row: the step of its id's last occurrence, and the number of occurrences, up to
            `MOST_SEEN`.
        evicted: float64 [tables, 2 + width]: `stoker.sparse.sparse_state.TableState.evicted` of each table.
    """

    def __init__(self, tables: Sequence[TableSettings], *, seed: int, rank: int = 0, world: int = 1) -> None:
        assert len({table.layout for table in tables}) == 1
        self.tables, self._settings, self._rank, self._world = tuple(tables), tables[0], rank, world
        self.salts = salts_of(tables)
        self._value_salts = np.array([salt_of("first values", seed, table.name) for table in tables])
        self._seed = seed
        self.index = IdIndex(self.salts)
        self.format = RowFormat(self._settings.dtype, self._settings.width)
        self._optimizer = OPTIMIZERS[self._settings.optimizer]
        self.state_columns = self._optimizer.columns(self._settings.width)
        shape = (self.format.columns, self.format.stored, self.state_columns, self.format.compute)
        disk = self._settings.disk
        self.store: MemoryRows | TieredRows = TieredRows(*shape, disk) if disk else MemoryRows(*shape)
        self.last, self.seen = np.zeros(1024, np.int32), np.zeros(1024, np.int32)
        self._numbers = np.zeros(1024, np.int32)
        self._make_room()
        self.evicted = np.zeros((len(self.tables), 2 + self._settings.width))
        self._scales = np.array([table.init_scale for table in tables])
        self.waiting = WaitingIds(tables, seed=seed, rank=rank, world=world)
        self._made: list[np.ndarray] = []  # rows created by this step's lookups
        self._touched: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # rows, and `last` and `seen` before
        self.gone = EvictedIds()
        self.step = 0

    @property
    def memory(self) -> ShardMemory:
        """Memory of this shard."""
        counters = self.last.nbytes + self.seen.nbytes + self._numbers.nbytes
        file = self.store.file_bytes if isinstance(self.store, TieredRows) else 0
        return ShardMemory(self.store.bytes, self.index.bytes, counters, self.waiting.bytes, file)

    # -- lookup and update ---------------------------------------------------------------------------------------

    def look_up(self, keys: Keys, counts: np.ndarray | None = None) -> Rows:
        """Finds rows for training, and counts occurrences. New ids of tables that admit every id get rows.

        Args:
            keys: [n], may repeat.
            counts: int64 [n], occurrences that each key represents; one each by default.
        """
        inverse, sums, keys = keys.deduplicated(counts)
        rows = self.find(keys)
        absent = np.flatnonzero(rows < self.index.first)
        if len(absent):
            new = self.waiting.admits_all[keys.tables[absent]]
            enter, wait = absent[new], absent[~new]
            self.waiting.see(keys[wait], sums[wait])
            rows[enter] = self._insert(keys[enter])
            self._made.append(rows[enter])
        seen = self.seen[rows]
        self._touched.append((rows, self.last[rows], seen))
        self.last[rows] = self.step
        self.seen[rows] = np.minimum(seen + sums, MOST_SEEN)
        return Rows(rows, inverse)

    def peek(self, keys: Keys) -> Rows:
        """Finds rows for evaluation, without changing anything."""
        inverse, _, keys = keys.deduplicated()
        return Rows(self.find(keys), inverse)

    def find(self, keys: Keys) -> np.ndarray:
        """Returns row numbers, int64 [n]; those of default rows for ids without a row."""
        rows = self.index.find(keys.ids, keys.tables, keys.hashes)
        absent = np.flatnonzero(rows == 0)
        rows[absent] = keys.tables[absent]
        return rows

    def preview(self, keys: Keys) -> Tensor:
        """Returns the values [n, width] that a lookup would return, without changing anything."""
        rows = self.find(keys)
        values = self.values(rows)
        new = np.flatnonzero((rows < self.index.first) & self.waiting.admits_all[keys.tables])
        if len(new):
            first = self._first(keys.ids[new], keys.tables[new])
            values[torch.from_numpy(new)] = self.format.decode(self.format.encode(first))
        return values

    def values(self, rows: np.ndarray) -> Tensor:
        """Returns values [n, width] of rows, in the dtype of computation."""
        absent = np.flatnonzero(rows < self.index.first)
        if not len(absent):
            return self.format.decode(self.store.values(rows))
        values = self.format.decode(self.store.values(np.where(rows < self.index.first, 0, rows)))
        values[torch.from_numpy(absent)] = torch.from_numpy(self.evicted[rows[absent], 2:]).to(values.dtype)
        return values

    def update(self, rows: np.ndarray, grads: Tensor, *, lr_factor: float = 1.0, values: Tensor | None = None) -> None:
        """Applies the optimizer.

        Args:
            rows: int64 [n], unique; default rows are not updated.
            grads: [n, width], sums over all occurrences of each row's id.
            values: the result of `values` for these rows, if nothing has been updated since; may be overwritten.
        """
        if len(default := np.flatnonzero(rows < self.index.first)):
            kept = np.delete(np.arange(len(rows)), default)
            rows, grads, values = rows[kept], grads[torch.from_numpy(kept)], None
        if not len(rows):
            return
        lr, decay = self._settings.lr * lr_factor, self._settings.weight_decay
        compiled = kernels().IN_PLACE.get(self._settings.optimizer)
        if compiled and isinstance(self.store, MemoryRows) and not (decay or self.format.rounds):
            compiled(*self.store.matrices, rows, grads, lr=lr, eps=self._settings.eps)
            return
        values = self.values(rows) if values is None else values
        state = self.store.state(rows)
        if decay:
            grads = grads.add(values, alpha=decay)
        if compiled:  # on copies; bit-identical to the update in place
            compiled(values.numpy(), state.numpy(), np.arange(len(rows)), grads, lr=lr, eps=self._settings.eps)
        else:
            self._optimizer.step(values, state, grads, self._settings, lr)
        noise = None
        if self.format.rounds:
            salt = salt_of("rounding", self._seed, self.step)
            hashes = hashes_of(self.index.ids[rows], self._value_salts[self.index.tables[rows]])
            noise = uniform(mix64(hashes + salt), self._settings.width)
        self.store.write(rows, self.format.encode(values, noise), state)

    def sum_by_row(self, rows: np.ndarray, grads: Tensor) -> tuple[np.ndarray, Tensor]:
        """Returns the unique rows, and the sum of the gradients of each."""
        unique, inverse = self._unique(rows)
        total = grads.new_zeros(len(unique), grads.shape[1])
        return unique, total.index_add_(0, torch.from_numpy(inverse), grads)

    def end_step(self) -> None:
        """Admits ids that occurred in this step, and counts the step. `evict` follows if a pass is due."""
        if (admitted := self.waiting.admitted(self.step)) is not None:
            keys, counts = admitted
            rows = self._insert(keys)
            self.seen[rows] = np.minimum(counts, MOST_SEEN)
        self._made.clear()
        self._touched.clear()
        self.step += 1

    def undo_step(self) -> None:
        """Undoes this step's lookups: removes the rows that they created, and their counts. The step does not end."""
        for rows, last, seen in reversed(self._touched):
            self.last[rows], self.seen[rows] = last, seen
        self._touched.clear()
        self.waiting.forget()
        if self._made:
            self.remove(np.concatenate(self._made))
            self._made.clear()

    def _unique(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the different rows and each row's index among them, in linear time."""
        places = np.arange(len(rows), dtype=np.int32)
        self._numbers[rows] = places  # the last of several assignments wins
        last = np.take(self._numbers, rows)
        is_last = last == places
        numbers = np.cumsum(is_last) - 1
        return rows[is_last], np.take(numbers, last)

    @property
    def waits(self) -> bool:
        """Whether lookups wait for a disk often enough for `prefetch` to pay."""
        return isinstance(self.store, TieredRows) and self.store.waits

    def prefetch(self, keys: Keys) -> None:
        """Starts to load rows from the file if lookups wait for it, without changing anything."""
        if isinstance(self.store, TieredRows) and self.store.waits:
            keys = keys.deduplicated()[2]
            rows = self.index.find(keys.ids, keys.tables, keys.hashes)
            self.store.prefetch(rows[rows > 0])

    # -- creation and deletion of rows -------------------------------------------------------------------------------

    def _insert(self, keys: Keys) -> np.ndarray:
        """Creates rows with initial values for unique ids without one; returns row numbers, int64 [n]."""
        rows = self.give_rows(keys)
        if len(rows):
            values = self._first(keys.ids, keys.tables)
            self.last[rows], self.seen[rows] = self.step, 0
            self.store.write(rows, self.format.encode(values), self._optimizer.first(values, self._settings))
        return rows

    def _first(self, ids: np.ndarray, tables: np.ndarray) -> Tensor:
        """Returns initial values [n, width]."""
        draws = uniform(hashes_of(ids, self._value_salts[tables]), self._settings.width)
        return torch.from_numpy((draws * 2 - 1) * self._scales[tables][:, None]).to(self.format.compute)

    def give_rows(self, keys: Keys) -> np.ndarray:
        """Assigns rows to ids without one, and reserves storage; returns row numbers, int64 [n]."""
        rows = self.index.insert(keys.ids, keys.tables, keys.hashes)
        self._make_room()
        self.store.reserve(self.index.top)
        return rows

    def _make_room(self) -> None:
        size = len(self.index.ids)
        if size > len(self.last):
            self.last, self.seen, self._numbers = (
                lengthened_copy(x, size) for x in (self.last, self.seen, self._numbers)
            )

    def evict(self, candidates: Candidates, plan: EvictionPlan) -> None:
        """Deletes rows, and sets the default rows of a plan."""
        for rows in candidates.going(plan.below):
            if len(rows):
                self.gone.add(self.step - 1, self.index.ids[rows], self.index.tables[rows].astype(np.int64))
                self.remove(rows)
        self.evicted = plan.evicted.copy()

    def remove(self, rows: np.ndarray) -> None:
        """Deletes rows in use; row numbers are unique."""
        self.index.remove(rows)
        self.store.free(rows)

    # -- state -----------------------------------------------------------------------------------------------------

    def state(
        self, since: int | None = None, *, rows: int | None = None, is_base: bool = True
    ) -> Iterator[tuple[str, TableState]]:
        """Yields rows of each table by id: all, or those whose ids occurred in step ``since`` or later.

        Evicted ids are recorded from one full state to the next, for the incremental states between them. Steps may
        be taken between two parts. A part then contains the rows at the time it is read, and an incremental state since
        the start contains the changes that the parts lack.

        Args:
            rows: maximum number of rows in each part of a table; by default a table is one part.
            is_base: whether incremental states may follow this one, if it is a full one.

        Raises:
            ValueError: ``since`` is before the last full state.
        """
        for part in self.lazy_parts(since, rows=rows, is_base=is_base):
            yield part.table, part.state()

    def lazy_parts(
        self, since: int | None = None, *, rows: int | None = None, is_base: bool = True
    ) -> Iterator[LazyPart]:
        """Yields the parts of `state`, whose rows are copied when they are read; no step may be taken before that."""
        if since is None and is_base:
            self.rebase(self.step)
        self.gone.check(since)
        yield from lazy_parts(self, since, rows)

    def rebase(self, step: int | None, *, by: str = "") -> None:
        """See `EvictedIds.rebase`."""
        self.gone.rebase(step, by=by, now=self.step)

    def counts(self) -> dict[str, int]:
        """Returns the number of rows of each table."""
        tables = self.index.tables[: self.index.top]
        return {table.name: int((tables == number).sum()) for number, table in enumerate(self.tables)}

    def load(self, name: str, state: TableState, *, step: int) -> None:
        """Loads this process' part of a state into the current rows.

        Raises:
            ValueError: the rows do not fit the table.
        """
        self.step = step
        self.gone.begin(step)
        load_table(self, name, state)

    def owned(self, ids: np.ndarray, number: int) -> tuple[Keys, np.ndarray]:
        """Returns the keys that this process owns among ids of a table, and their indices."""
        keys = Keys.of(np.ascontiguousarray(ids), np.full(len(ids), number), self.salts)
        at = np.flatnonzero(owners_of(keys.hashes, self._world) == self._rank)
        return keys[at], at
