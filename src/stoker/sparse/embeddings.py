"""The interface of embedding tables to the model, its checkpoints and its training loop, for any storage of rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from torch import nn

from stoker.sparse.jagged_ids import JaggedIds
from stoker.sparse.sparse_state import LazyPart, SparseState
from stoker.sparse.table_settings import TableSettings


@dataclass(frozen=True)
class Admissions:
    """Numbers of rows and ids, over all tables and processes.

    Attributes:
        rows: current number of rows.
        admitted, evicted: number of ids so far; one that was evicted and got a row again is admitted twice.
    """

    rows: int
    admitted: int
    evicted: int


class Embeddings(nn.Module, ABC):
    """Embedding tables that look up the ids of features; calls return pooled rows by feature.

    In a process group calls are collectives, and so are `found`, `admissions`, `prefetch`, `gradients_are_finite`,
    `apply_gradients`, `discard`, `end_empty_steps`, `load` and `end_load`.
    """

    @property
    @abstractmethod
    def tables(self) -> list[TableSettings]:
        """The tables, in the order in which they were given."""

    @property
    @abstractmethod
    def version(self) -> int:
        """Number of steps that have ended."""

    @property
    @abstractmethod
    def rows(self) -> dict[str, int]:
        """Number of rows of each table on this process."""

    @abstractmethod
    def found(self, ids: Mapping[str, JaggedIds]) -> dict[str, np.ndarray]:
        """Returns which ids of each feature have a row, bool [n]."""

    @abstractmethod
    def default_rows(self) -> dict[str, np.ndarray]:
        """Returns the default row of each table, float64 [width]. Not a collective."""

    @abstractmethod
    def admissions(self) -> Admissions:
        """Returns the number of rows, and the numbers of admitted and evicted ids."""

    @abstractmethod
    def prefetch(self, *batches: Mapping[str, JaggedIds]) -> None:
        """Begins to load the rows of this process' coming batches; other processes may have more or fewer batches."""

    @abstractmethod
    def gradients_are_finite(self) -> bool:
        """Returns whether this step's gradients are finite, as far as this process has them.

        Depending on the engine, they are the gradients of the rows, or those of the pooled rows.
        """

    @abstractmethod
    def apply_gradients(self, *, scale: float = 1.0, lr_factor: float = 1.0) -> None:
        """Updates the rows that were looked up, each once, and ends the step."""

    @abstractmethod
    def discard(self) -> None:
        """Forgets this step's lookups. The step has not ended."""

    @abstractmethod
    def end_empty_steps(self, until: int) -> None:
        """Ends steps without lookups, until ``until`` steps have ended."""

    @abstractmethod
    def state(self, since: int | None = None, *, is_base: bool = True) -> SparseState:
        """Returns a copy of this process' rows by id; with ``since``, of those seen or evicted after that version."""

    @abstractmethod
    def parts(self, since: int | None = None, *, rows: int = 2**20, is_base: bool = True) -> Iterator[SparseState]:
        """Yields this process' rows in parts of limited size."""

    @abstractmethod
    def lazy_parts(self, since: int | None = None, *, part_bytes: int, is_base: bool = True) -> Iterator[LazyPart]:
        """Yields a state in parts, each copied when it is read; no step may be taken before that."""

    @abstractmethod
    def rebase(self, version: int | None, *, by: str = "") -> None:
        """Sets how far one consumer's incremental states will reach back."""

    def load(self, parts: Iterable[SparseState]) -> None:
        """Loads states into the present tables.

        Args:
            parts: those of all processes that saved, however many; incremental ones after their full ones.

        Raises:
            ValueError: rows do not fit their table, or a table is not one of these.
        """
        for part in parts:
            self.put(part)
        self.end_load()

    @abstractmethod
    def put(self, part: SparseState) -> None:
        """Takes over one part of a state; `end_load` follows the last one."""

    @abstractmethod
    def end_load(self) -> None:
        """Waits until loaded rows can be looked up."""
