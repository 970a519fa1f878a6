"""The module that a model looks ids up in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from stoker.sparse.embeddings import Admissions, Embeddings
from stoker.sparse.eviction_pass import EvictionPlan, eviction_plans, is_due
from stoker.sparse.exchanged_rows import ExchangedRows
from stoker.sparse.fused_tables import Feature, FusedTables, TableRows
from stoker.sparse.jagged_ids import JaggedIds
from stoker.sparse.servers.served_rows import RowServers, served_rows
from stoker.sparse.shard_memory import state_bytes
from stoker.sparse.sparse_state import LazyPart, SparseState, TableState
from stoker.sparse.table_settings import TableSettings, by_layout


class SparseEmbeddings(Embeddings):
    """Embedding tables whose rows are made when an id is first seen, sharded over processes by id.

    >>> embeddings = SparseEmbeddings([TableSettings("users", 16)], {"user": Feature("users")}, seed=0)
    >>> pooled = embeddings({"user": JaggedIds.single(ids)})
    >>> loss_of(pooled["user"]).backward()
    >>> embeddings.apply_gradients()

    Rows are not parameters: optimizers, DDP and ZeRO do not see them. Their gradients are accumulated until
    `apply_gradients`, over any number of forward and backward passes, and are summed over the processes, as if one
    process had all samples.

    In evaluation mode ids without a row get the default row, and nothing is inserted, counted or evicted.

    Args:
        tables: tables of one width, type and optimizer are looked up together.
        features: by name; forward passes return one tensor for each.
        seed: of initial values, of admission by probability and of stochastic rounding.
        group: processes that own the rows together and each have their own samples; None for one process.
        device: of the returned tensors; rows are in host memory.
        dtype: of the returned tensors; by default float64 if a table has it, else float32.
        servers: parameter servers that own the rows instead.

    Raises:
        ValueError: a feature names no table, or names repeat.
        RunFailed: a server cannot be reached.
    """

    def __init__(
        self,
        tables: Sequence[TableSettings],
        features: Mapping[str, Feature],
        *,
        seed: int = 0,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        servers: RowServers | None = None,
    ) -> None:
        super().__init__()
        names = [table.name for table in tables]
        if len(set(names)) < len(names):
            raise ValueError(f"names of tables repeat: {sorted(names)}")
        for name, feature in features.items():
            if feature.table not in names:
                raise ValueError(f"feature {name!r} is looked up in {feature.table!r}; there are {sorted(names)}")
        group = None if group is None or dist.get_world_size(group) == 1 else _over_host_memory(group)
        wide = any(table.dtype == "float64" for table in tables)
        dtype = dtype or (torch.float64 if wide else torch.float32)
        self._tables, self._features, self._group = tuple(tables), dict(features), group
        layouts = by_layout(tables)
        if servers is None:
            sources: list[TableRows] = [ExchangedRows(some, seed=seed, group=group) for some in layouts]
        else:
            sources = [*served_rows(layouts, servers, seed=seed, group=group)]
        self._fused = [
            FusedTables(some, features, source, device=torch.device(device), dtype=dtype)
            for some, source in zip(layouts, sources, strict=True)
        ]

    @property
    def tables(self) -> list[TableSettings]:
        """The tables, in the order of the constructor's argument."""
        return list(self._tables)

    @property
    def version(self) -> int:
        """Number of steps that have ended."""
        return self._fused[0].source.step

    @property
    def rows(self) -> dict[str, int]:
        """Number of rows of each table on this process."""
        return {name: count for fused in self._fused for name, count in fused.source.counts().items()}

    def default_rows(self) -> dict[str, np.ndarray]:
        """Returns the default row of each table, float64 [width]."""
        return {name: evicted[2:] for name, evicted in self._evicted().items()}

    def admissions(self) -> Admissions:
        """Returns the number of rows, and the numbers of admitted and evicted ids. A collective."""
        rows = torch.tensor(sum(self.rows.values()))
        if self._group is not None:
            dist.all_reduce(rows, group=self._group)
        evicted = round(sum(float(each[0]) for each in self._evicted().values()))
        return Admissions(int(rows), int(rows) + evicted, evicted)

    def _evicted(self) -> dict[str, np.ndarray]:
        """Returns `TableState.evicted` of each table."""
        return {
            table.name: row
            for fused in self._fused
            for table, row in zip(fused.tables, fused.source.evicted(), strict=True)
        }

    def forward(self, ids: Mapping[str, JaggedIds]) -> dict[str, Tensor]:
        """Looks up and pools the rows of each feature's ids. A collective.

        Args:
            ids: of every feature. Features may differ in their numbers of samples.

        Returns:
            by feature: [batch, width], or [batch, longest, width] without pooling.

        Raises:
            ValueError: a feature has no ids.
        """
        if missing := self._features.keys() - ids.keys():
            raise ValueError(f"features without ids: {sorted(missing)}")
        found: dict[str, Tensor] = {}
        for fused in self._fused:
            found |= fused.look_up(ids, training=self.training)
        return {name: found[name] for name in self._features}

    def found(self, ids: Mapping[str, JaggedIds]) -> dict[str, np.ndarray]:
        """Returns which ids of each feature have a row on this process, bool [n]. Nothing is inserted or counted.

        Raises:
            ValueError: the rows are on servers.
        """
        found: dict[str, np.ndarray] = {}
        for fused in self._fused:
            if not isinstance(fused.source, ExchangedRows):
                raise ValueError("rows on servers are looked up, and not whether they are there")
            for name, keys in fused.features.keys(ids).items():
                found[name] = fused.source.shard.index.find(keys.ids, keys.tables, keys.hashes) > 0
        return {name: found[name] for name in ids}

    def prefetch(self, *batches: Mapping[str, JaggedIds]) -> None:
        """Begins to load the rows of coming batches, where tables have some on disk. A collective.

        Results are the same without it.

        Args:
            batches: of this process; other processes may have more or fewer.
        """
        for fused in self._fused:
            fused.prefetch(batches)

    def gradients_are_finite(self) -> bool:
        """Returns whether this step's gradients are finite, as far as this process has them. A collective."""
        found = [fused.source.gradients_are_finite() for fused in self._fused]  # of all: each call is a collective
        return all(found)

    def apply_gradients(self, *, scale: float = 1.0, lr_factor: float = 1.0) -> None:
        """Updates the rows that were looked up since the last call, each once, and ends the step. A collective.

        Args:
            scale: factor of all gradients, such as that of clipping.
            lr_factor: factor of each table's learning rate, such as that of a schedule. FTRL ignores it.
        """
        for fused in self._fused:
            fused.source.apply(scale=scale, lr_factor=lr_factor)
        if due := [fused for fused in self._fused if is_due(fused.tables, self.version)]:
            self._evict([fused.tables for fused in due], [fused.source for fused in due])

    def _evict(self, layouts: Sequence[Sequence[TableSettings]], sources: Sequence[TableRows]) -> None:
        plans: Sequence[EvictionPlan | None] = [None] * len(sources)
        if sources[0].plans_evictions:
            before = [source.evicted() for source in sources]
            plans = eviction_plans(
                layouts, self.version, before, lambda n, what, arrays: sources[n].candidates(what, arrays)
            )
        for source, plan in zip(sources, plans, strict=True):
            source.evict(plan)

    def discard(self) -> None:
        """Forgets this step's lookups: no row is updated, and those that they made are gone. A collective.

        The step has not ended: if it is repeated, the result is the same as without the discarded attempt.
        """
        for fused in self._fused:
            fused.source.discard()

    def end_empty_steps(self, until: int) -> None:
        """Ends steps without lookups, until ``until`` steps have ended: ages and evictions follow the run's steps.

        A collective.
        """
        while self.version < until:
            self.apply_gradients()

    def state(self, since: int | None = None, *, is_base: bool = True) -> SparseState:
        """Returns a copy of this process' rows, by id.

        Args:
            since: a former `version`: only rows that were seen after it, and the ids of those evicted after it.
            is_base: whether incremental states may follow a full one; see `rebase`.

        Raises:
            ValueError: ``since`` is before the last full state, as evicted ids are recorded from one to the next.
        """
        parts: dict[str, list[TableState]] = {}
        for fused in self._fused:
            for name, table in fused.source.state(since, is_base=is_base):
                parts.setdefault(name, []).append(table)
        return SparseState(self.version, since, {name: TableState.joined(some) for name, some in parts.items()})

    def parts(self, since: int | None = None, *, rows: int = 2**20, is_base: bool = True) -> Iterator[SparseState]:
        """Yields `state` in parts of limited size, for tables that are larger than memory.

        Steps may be taken between two parts, unless rows are on servers; a later `state` since the beginning, where
        `rebase` was called, contains the changes that the parts lack.

        Args:
            rows: maximum number of rows of a part, which has rows of one table.
        """
        for fused in self._fused:
            for name, table in fused.source.state(since, rows=rows, is_base=is_base):
                yield SparseState(self.version, since, {name: table})

    def lazy_parts(self, since: int | None = None, *, part_bytes: int, is_base: bool = True) -> Iterator[LazyPart]:
        """Yields a state in parts, each copied when it is read; no step may be taken before that.

        Args:
            part_bytes: approximate size of the rows in a part.
        """
        for fused in self._fused:
            rows = max(1, part_bytes // state_bytes(fused.tables, 1))
            yield from fused.source.lazy_parts(since, rows=rows, is_base=is_base)

    def rebase(self, version: int | None, *, by: str = "") -> None:
        """Sets that one consumer's incremental states reach back to ``version`` at most; None for no states.

        Evicted ids are recorded as long as a consumer needs them.

        Args:
            by: the consumer's name; consumers are independent of each other.
        """
        for fused in self._fused:
            fused.source.rebase(version, by=by)

    def put(self, part: SparseState) -> None:
        """Loads one part of a state; `end_load` follows the last one.

        Raises:
            ValueError: rows do not fit their table, or a table is not one of these.
        """
        sources = {table.name: fused.source for fused in self._fused for table in fused.tables}
        if unknown := part.tables.keys() - sources.keys():
            raise ValueError(f"there are no tables {sorted(unknown)}; there are {sorted(sources)}")
        for name, table in part.tables.items():
            sources[name].load(name, table, step=part.step)

    def end_load(self) -> None:
        """Waits until loaded rows can be looked up. A collective."""
        for fused in self._fused:
            fused.source.end_load()


def _over_host_memory(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Returns a group of the same processes that exchanges tensors in host memory."""
    if "gloo" in str(dist.get_backend_config(group)):
        return group
    ranks = dist.get_process_group_ranks(group)
    return dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
