"""Rows of tables in checkpoints: stored by id, in parts that are copied one after another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stoker.checkpoint.chunks import ArrivingChunk, Chunk, DeferredChunk, Held
from stoker.checkpoint.object_collectives import rank
from stoker.checkpoint.state import Saved
from stoker.checkpoint.tensor_names import BASE_ROWS, ROWS, TABLES
from stoker.errors import RunFailed
from stoker.sparse.embeddings import Embeddings
from stoker.sparse.shard_state import no_rows
from stoker.sparse.sparse_state import SparseState, TableState

if TYPE_CHECKING:
    from stoker.train.ranking.ranking_task import RankingTask

STEP = f"{TABLES}step"
PART_BYTES = 32 << 20  # approximate bytes of a part's rows


ASKER = "checkpoint"  # name under which the tables track changes for incremental checkpoints


@dataclass
class _Base:
    """The last full checkpoint.

    Attributes:
        version: version of the tables.
        followed: incremental checkpoints since then.
    """

    step: int
    tables: Embeddings
    version: int
    followed: int = 0


class SavedTables:
    """`stoker.train.training_state.FurtherState` of table rows: ``sparse/rows/PART/TABLE/ids`` and the other columns.

    A part has some rows of one table and one process; its memory is allocated when it is written or read. A process
    reads all parts and keeps the rows that it owns, so a checkpoint can be restored on any number of processes.

    One of ``full_every`` checkpoints has all rows. Those between have the rows that were looked up and the ids that
    were evicted since the last full one, so each needs that one alone. After a restart the next checkpoint is full.

    Attributes:
        base: step of the full checkpoint that the last result of `now` adds to; None if the result is full.
    """

    def __init__(self, task: RankingTask, make: Callable[[], Embeddings], full_every: int = 1) -> None:
        """
        Args:
            make: returns tables without rows, for a run that goes back to an earlier state.
        """
        self._task, self._make, self._full_every = task, make, full_every
        self._arriving: ArrivingRows | None = None
        self._last: _Base | None = None
        self.base: int | None = None

    @property
    def streams(self) -> bool:
        """Whether rows are too large to copy in memory: the job keeps some of them in files."""
        return any(table.disk is not None for table in self._task.tables.tables)

    def now(self, step: int, is_whole: Callable[[int], bool] | None) -> Held:
        self._task.before_pause("checkpoint")
        tables, since = self._task.tables, self._since(step, is_whole)
        version = [tables.version, -1 if since is None else since]
        held: dict[str, list[Chunk]] = {STEP: [Chunk.whole(torch.tensor(version))]}
        for number, part in enumerate(tables.lazy_parts(since, part_bytes=PART_BYTES, is_base=False)):
            for name, column in part.columns.items():
                if 0 not in column.shape:
                    key = f"{ROWS}{rank():05d}-{number:06d}/{part.table}/{name}"
                    held[key] = [DeferredChunk.of(column.shape, column.dtype, column.read)]
        return held

    def _since(self, step: int, is_whole: Callable[[int], bool] | None) -> int | None:
        """Returns the version of the tables that the next checkpoint adds to, if any. A collective."""
        self.base = None
        tables, last = self._task.tables, self._last
        if is_whole is None or self._full_every == 1:
            return None
        may_add = last is not None and last.tables is tables and last.followed + 1 < self._full_every
        if last is not None and may_add and is_whole(last.step):
            last.followed += 1
            self.base = last.step
            return last.version
        tables.rebase(tables.version, by=ASKER)
        self._last = _Base(step, tables, tables.version)
        return None

    def places(self, saved: Mapping[str, Saved]) -> Held:
        self._last = None
        if self._task.tables.version or self._arriving is not None:
            self._task.tables = self._make()
        self._arriving = ArrivingRows(self._task.tables)
        return self._arriving.places(saved)

    def restored(self) -> None:
        assert self._arriving is not None
        self._arriving.end()
        self._arriving = None


@dataclass
class _Part:
    """Columns of a part of a table's rows; ``expected`` is their number."""

    table: str
    expected: int
    columns: dict[str, Tensor] = field(default_factory=dict)


class ArrivingRows:
    """Loads a checkpoint's rows into empty tables, part by part as they are read."""

    def __init__(self, tables: Embeddings) -> None:
        self._tables, self._step = tables, torch.zeros(2, dtype=torch.int64)
        self._nothing = {table.name: no_rows(table) for table in tables.tables}

    def places(self, saved: Mapping[str, Saved]) -> Held:
        """Returns the destinations of a checkpoint's rows, in the order in which they must be read."""
        held: dict[str, list[Chunk]] = {}
        parts: dict[str, _Part] = {}
        for name in sorted(name for name in saved if name.startswith(TABLES)):  # the base's rows sort first
            entry = saved[name]
            if name == STEP:
                held[name] = [Chunk.whole(self._step)]
                continue
            kind = BASE_ROWS if name.startswith(BASE_ROWS) else ROWS
            number, _, rest = name.removeprefix(kind).partition("/")
            table, _, column = rest.rpartition("/")
            self._check(table, column, entry)
            part = parts.setdefault(f"{kind}{number}/{table}", _Part(table, 0))
            part.expected += 1
            held[name] = [ArrivingChunk.of(entry.shape, entry.dtype, self._taker(part, column))]
        return held

    def end(self) -> None:
        """Finishes loading after all rows have been read. A collective."""
        step = int(self._step[0])
        self._tables.load([SparseState(step, None, self._nothing)])
        self._tables.rebase(None)  # nothing tracks changes yet

    def _check(self, table: str, column: str, entry: Saved) -> None:
        """Checks a column against this job's tables; raises RunFailed where they differ."""
        nothing = self._nothing.get(table)
        if nothing is None:
            raise RunFailed(f"the checkpoint is of another model: it has rows of table {table!r}")
        own = getattr(nothing, column)
        if column in ("values", "optimizer") and entry.shape[1:] != tuple(own.shape[1:]):
            sizes = f"{entry.shape[1]} numbers a row, and this job's {own.shape[1]}"
            raise RunFailed(f"the checkpoint is of another model: {column} of table {table!r} are {sizes}")
        if column == "values" and entry.dtype != own.dtype:
            types = f"{entry.dtype}, and this job's {own.dtype}"
            raise RunFailed(f"the checkpoint is of another model: values of table {table!r} are {types}")

    def _taker(self, part: _Part, column: str) -> Callable[[Tensor], None]:
        def take(tensor: Tensor) -> None:
            part.columns[column] = tensor
            if len(part.columns) == part.expected:
                self._put(part)

        return take

    def _put(self, part: _Part) -> None:
        nothing = self._nothing[part.table]
        count = len(part.columns.get("ids", nothing.ids))
        columns = {name: getattr(nothing, name) for name in ("ids", "values", "optimizer", "seen", "last")}
        columns = {name: tensor.new_empty(count, *tensor.shape[1:]) for name, tensor in columns.items()}
        self._tables.put(SparseState(0, None, {part.table: TableState(**{**columns, **part.columns})}))
        part.columns = {}
