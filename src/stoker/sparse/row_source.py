"""The interface to the storage of rows: on the training processes, or on servers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
from torch import Tensor

from stoker.sparse.eviction_pass import EvictionPlan
from stoker.sparse.keys import Keys
from stoker.sparse.sparse_state import LazyPart, TableState


class TableRows(Protocol):
    """Rows of tables with one layout, spread by id. Every method is a collective of the processes that train.

    Attributes:
        salts: uint64 [tables], for the hashes of keys.
        plans_evictions: whether this process plans passes that evict rows, alone or with all others.
    """

    salts: np.ndarray
    plans_evictions: bool

    @property
    def step(self) -> int:
        """Steps that have ended."""

    def rows(self, keys: Keys, *, training: bool) -> tuple[Tensor, np.ndarray]:
        """Rows [unique, width] of keys, and int64 [n] the place of each key's among them.

        In training, with gradients enabled, the rows are leaves whose gradients belong to the step.
        """

    def prefetch(self, keys: Keys) -> None:
        """Starts to load rows from files, where lookups wait for the disk."""

    def squared_norm(self) -> float:
        """The squared norm of the step's gradients, over all rows."""

    def apply(self, *, scale: float, lr_factor: float) -> None:
        """Updates rows and ends the step."""

    def discard(self) -> None:
        """Forgets the step's lookups; the step has not ended."""

    def state(
        self, since: int | None, *, rows: int | None = None, is_base: bool = True
    ) -> Iterator[tuple[str, TableState]]:
        """This process' part of all rows, as `TableShard.state`."""

    def lazy_parts(self, since: int | None, *, rows: int, is_base: bool) -> Iterator[LazyPart]:
        """As `state`, but each part is copied when it is read; no step may be taken before that."""

    def rebase(self, step: int | None, *, by: str) -> None:
        """Sets how far a consumer's incremental states reach back, as `TableShard.rebase`."""

    def load(self, name: str, state: TableState, *, step: int) -> None:
        """Loads this process' part of a state."""

    def end_load(self) -> None:
        """Waits until loaded rows can be looked up."""

    def counts(self) -> dict[str, int]:
        """Rows of each table in this process' part."""

    def candidates(self, what: str, arrays: list[np.ndarray]) -> np.ndarray:
        """Returns the sum of all shards' answers: `stoker.sparse.eviction_pass.Candidates.answer`."""

    def evict(self, plan: EvictionPlan | None) -> None:
        """Deletes rows after a step. With a plan on the processes that plan evictions."""

    def evicted(self) -> np.ndarray:
        """The totals of evicted rows of each table, on all processes: float64 [tables, 2 + width], as
        `stoker.sparse.sparse_state.TableState.evicted`.
        """
