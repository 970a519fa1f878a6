"""The first version of a store that follows a run: all rows of a process, written in parts while steps go on."""

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
ASKER = "export.sync"  # whom the tables know the store's updates by


class FirstVersion:
    """A version that is being made of all rows of this process.

    Attributes:
        oldest: when the first step ended that was not sent before.
        rows: written so far.
    """

    def __init__(self, version: int, tables: Embeddings, oldest: float) -> None:
        self.version, self.tables, self.oldest = version, tables, oldest
        self.began, self.rows = time.time(), 0
        self._base = tables.version
        tables.rebase(self._base, by=ASKER)
        self._parts = tables.parts(rows=PART_ROWS, is_base=False)
        self._numbers = stored_tables(tables.tables)

    def go_on(self, put: Callable[[int, TableDelta], None], seconds: float) -> bool:
        """Writes parts for a while; whether all rows are there, as they are now."""
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
    """What a store is sent of a state."""
    ids, rows = stored_rows(state)
    return TableDelta(table, ids, rows, np.setdiff1d(state.removed.numpy(), ids, assume_unique=True))
