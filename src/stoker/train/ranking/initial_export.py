"""First version of a store that follows a run: all rows of a process, written in parts between steps."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from stoker.online_store.row_backends import StoredTable
from stoker.online_store.store_version import TableDelta
from stoker.sparse.embeddings import Embeddings
from stoker.sparse.sparse_state import SparseState, TableState
from stoker.sparse.stored_embeddings import stored_rows, stored_tables

PART_ROWS = 1 << 17
ASKER = "export.sync"  # name under which the tables track the store's updates


class InitialExport:
    """A version being built from all rows of this process.

    Attributes:
        oldest: end of the first step that was not sent before.
        rows: rows written so far.
    """

    def __init__(self, version: int, tables: Embeddings, oldest: float) -> None:
        self.version, self.tables, self.oldest = version, tables, oldest
        self.began, self.rows = time.time(), 0
        self._base = tables.version
        tables.rebase(self._base, by=ASKER)
        self._parts = tables.parts(rows=PART_ROWS, is_base=False)
        self._numbers = stored_tables(tables.tables)

    def go_on(self, put: Callable[[int, TableDelta], None], seconds: float) -> bool:
        """Writes parts for some seconds; returns whether all rows are written, in their current state."""
        until = time.monotonic() + seconds
        for part in self._parts:
            self._put(put, part)
            if time.monotonic() >= until:
                return False
        self._put(put, self.tables.state(since=self._base))
        return True

    def _put(self, put: Callable[[int, TableDelta], None], part: SparseState) -> None:
        for name, table in part.tables.items():
            put(self.version, delta_of(self._numbers[name], table))
            self.rows += len(table.ids)


def delta_of(table: StoredTable, state: TableState) -> TableDelta:
    """Converts a table's state to the delta that a store receives."""
    ids, rows = stored_rows(state)
    return TableDelta(table, ids, rows, np.setdiff1d(state.removed.numpy(), ids, assume_unique=True))
