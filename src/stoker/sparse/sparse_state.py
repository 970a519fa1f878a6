"""Rows by id, as checkpoints store them: independent of slots, processes and the order of arrival."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor


@dataclass(frozen=True)
class TableState:
    """Rows of one table on one process.

    Attributes:
        ids: int64 [n], ascending.
        values: [n, columns] as stored.
        optimizer: [n, state columns].
        seen: int32 [n], occurrences since the row was made.
        last: int32 [n], the step in which each was last seen.
        removed: int64 [m], in an incremental state the ids whose rows were evicted; some may have rows again.
        buckets: int64 [b], and ``sketch`` int32 [b, hashes, cells]: counters of ids that have no row yet.
        evicted: float64 [1, 2 + width], totals of evicted rows on all processes: their number, the weight of
            their mean, and the mean, which is the default row. [0, 0] if there are none.
    """

    ids: Tensor
    values: Tensor
    optimizer: Tensor
    seen: Tensor
    last: Tensor
    removed: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    buckets: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    sketch: Tensor = field(default_factory=lambda: torch.empty(0, 0, 0, dtype=torch.int32))
    evicted: Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.float64))

    @classmethod
    def joined(cls, parts: Sequence[TableState]) -> TableState:
        """Returns the rows of several, in the order of their ids."""
        if len(parts) == 1:
            return parts[0]
        columns = {part.name: torch.cat([getattr(some, part.name) for some in parts]) for part in fields(cls)}
        order = columns["ids"].argsort()
        by_row = {name: columns[name][order] for name in ("ids", "values", "optimizer", "seen", "last")}
        return cls(**{**columns, **by_row})


@dataclass(frozen=True)
class LazyColumn:
    """A tensor of a part of a state that is not made yet.

    Attributes:
        read: makes it; rows must not have changed since.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @classmethod
    def of(cls, tensor: Tensor) -> LazyColumn:
        """Wraps a tensor that is in memory."""
        return cls(tuple(tensor.shape), tensor.dtype, lambda: tensor)


@dataclass(frozen=True)
class LazyPart:
    """A part of a table's state that takes no memory until it is read.

    Attributes:
        table: its name.
        columns: by the names of `TableState`.
    """

    table: str
    columns: Mapping[str, LazyColumn]

    def state(self) -> TableState:
        """Returns a copy of the rows."""
        return TableState(**{name: column.read() for name, column in self.columns.items()})


@dataclass(frozen=True)
class SparseState:
    """One process' rows of all tables.

    Attributes:
        step: steps done; the version of this state.
        since: None if it has all rows, else it has those that were seen in step ``since`` or later.
        tables: by name.
    """

    step: int
    since: int | None
    tables: Mapping[str, TableState]

    def tensors(self) -> dict[str, Tensor]:
        """Returns tensors by name: ``TABLE/ids``, ``TABLE/values`` ..., and ``step``, [steps done, since or -1]."""
        found = {"step": torch.tensor([self.step, -1 if self.since is None else self.since])}
        for name, table in self.tables.items():
            found |= {f"{name}/{part.name}": getattr(table, part.name) for part in fields(table)}
        return found

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> SparseState:
        """Restores a state from the output of `tensors`."""
        step, since = tensors["step"].tolist()
        by_table: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            table, _, part = name.rpartition("/")
            if table:
                by_table.setdefault(table, {})[part] = tensor
        return cls(step, None if since < 0 else since, {name: TableState(**parts) for name, parts in by_table.items()})
