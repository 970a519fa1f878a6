"""Ids without a row: their counts, and their admission at the end of a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from stoker.sparse.hashing import salt_of, uniform
from stoker.sparse.sketch import CountMinSketch
from stoker.sparse.sparse_state import TableState
from stoker.sparse.table_keys import Keys
from stoker.sparse.table_settings import TableSettings
from stoker.splitmix64 import mix64


class WaitingIds:
    """Admission rules of tables, by index, and the occurrences of ids so far.

    Args:
        rank, world: this shard's rank among ``world``; only the ids that it owns are counted.

    Attributes:
        admits_all: bool [tables], whether ids of a table get a row at their first occurrence.
    """

    def __init__(self, tables: Sequence[TableSettings], *, seed: int, rank: int, world: int) -> None:
        self._tables, self._seed = tables, seed
        self.admits_all = np.array([table.admission is None for table in tables])
        self._sketches = {
            number: CountMinSketch(table.admission.cells, rank=rank, world=world)
            for number, table in enumerate(tables)
            if table.admission is not None and table.admission.count > 1
        }
        self._seen: list[tuple[Keys, np.ndarray]] = []  # occurrences in this step

    @property
    def bytes(self) -> int:
        """Memory of the counters in bytes."""
        return sum(sketch.counts.nbytes for sketch in self._sketches.values())

    def see(self, keys: Keys, counts: np.ndarray) -> None:
        """Records ids without a row, and their numbers of lookups."""
        if len(keys):
            self._seen.append((keys, counts))

    def forget(self) -> None:
        """Drops the occurrences of this step."""
        self._seen.clear()

    def admitted(self, step: int) -> tuple[Keys, np.ndarray] | None:
        """Counts a step's occurrences; returns the unique ids that get a row, and their occurrences in the step."""
        if not self._seen:
            return None
        keys = Keys.concatenated([keys for keys, _ in self._seen])
        counts = np.concatenate([counts for _, counts in self._seen])
        self._seen.clear()
        _, counts, keys = keys.deduplicated(counts)
        draws = uniform(mix64(keys.hashes + salt_of("admission", self._seed, step)), 1)[:, 0]
        chosen = np.zeros(len(keys), bool)
        for number in np.unique(keys.tables).tolist():
            rule = self._tables[number].admission
            assert rule is not None
            mine = np.flatnonzero(keys.tables == number)
            drawn = counts[mine]
            if rule.count > 1:
                seen = self._sketches[number].add(keys.hashes[mine], drawn)
                drawn = np.minimum(drawn, np.maximum(seen - rule.count + 1, 0))  # from the count-th occurrence on
            chosen[mine] = draws[mine] < 1 - (1 - rule.probability) ** drawn
        return keys[chosen], counts[chosen]

    def state(self, number: int) -> dict[str, Tensor]:
        """Returns the fields of `TableState` with a table's counters."""
        sketch = self._sketches.get(number)
        if sketch is None:
            return {}
        return {"buckets": torch.from_numpy(sketch.buckets), "sketch": torch.from_numpy(sketch.counts.copy())}

    def load(self, number: int, state: TableState) -> None:
        """Loads the counters of this process' ids."""
        if number in self._sketches and len(state.buckets):
            self._sketches[number].load(state.buckets.numpy(), state.sketch.numpy())
