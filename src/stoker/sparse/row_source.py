"""Interface to the storage of rows: on the training processes, or on servers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
from torch import Tensor

from stoker.sparse.eviction_pass import EvictionPlan
from stoker.sparse.sparse_state import LazyPart, TableState
from stoker.sparse.table_keys import Keys


class TableRows(Protocol):
    """Rows of tables with one layout, sharded by id. Every method is a collective of the training processes.

    Attributes:
        salts: uint64 [tables], hash salt of each table.
        plans_evictions: whether this process plans eviction passes, alone or with all others.
    """

    salts: np.ndarray
    plans_evictions: bool

    @property
    def step(self) -> int:
        """Number of completed steps."""

    def rows(self, keys: Keys, *, training: bool) -> tuple[Tensor, np.ndarray]:
        """Returns the unique rows [unique, width] of keys, and the index of each key's row among them, int64 [n].

        In training, with gradients enabled, the rows are leaves whose gradients are applied by the step.
        """

    def prefetch(self, keys: Keys) -> None:
        """Starts to load rows from files, if lookups wait for the disk."""

    def gradients_are_finite(self) -> bool:
        """Returns whether the step's gradients are finite, as far as this process has them."""

    def apply(self, *, scale: float, lr_factor: float) -> None:
        """Updates rows and ends the step."""

    def discard(self) -> None:
        """Drops the step's lookups, without ending the step."""

    def state(
        self, since: int | None, *, rows: int | None = None, is_base: bool = True
    ) -> Iterator[tuple[str, TableState]]:
        """Returns this process' part of all rows; see `TableShard.state`."""

    def lazy_parts(self, since: int | None, *, rows: int, is_base: bool) -> Iterator[LazyPart]:
        """Returns the parts of `state`, each copied when it is read; no step may be taken before that."""

    def rebase(self, step: int | None, *, by: str) -> None:
        """Sets the step from which a consumer's incremental states start; see `TableShard.rebase`."""

    def load(self, name: str, state: TableState, *, step: int) -> None:
        """Loads this process' part of a state."""

    def end_load(self) -> None:
        """Waits until loaded rows can be looked up."""

    def counts(self) -> dict[str, int]:
        """Returns the number of rows of each table in this process' part."""

    def candidates(self, what: str, arrays: list[np.ndarray]) -> np.ndarray:
        """Returns the sum of all shards' answers: `stoker.sparse.eviction_pass.Candidates.answer`."""

    def evict(self, plan: EvictionPlan | None) -> None:
        """Deletes rows after a step. Processes that plan evictions pass a plan."""

    def evicted(self) -> np.ndarray:
        """Returns the totals of evicted rows of each table, on all processes: float64 [tables, 2 + width]; see
        `stoker.sparse.sparse_state.TableState.evicted`.
        """
