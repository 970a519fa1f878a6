"""Ids of evicted rows, recorded for as long as an incremental state may need them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class _Evicted:
    """Ids that were evicted in a step, and their tables, int64 [n] each."""

    step: int
    ids: np.ndarray
    tables: np.ndarray


class EvictedIds:
    """The ids evicted since the earliest of the bases.

    Attributes:
        bases: the steps that incremental states reach back to, by consumer.
    """

    def __init__(self) -> None:
        self.bases: dict[str, int] = {}
        self._removed: list[_Evicted] = []

    def __len__(self) -> int:
        return sum(len(some.ids) for some in self._removed)

    def add(self, step: int, ids: np.ndarray, tables: np.ndarray) -> None:
        """Records ids that were evicted in a step, if a consumer may need them."""
        if self.bases:
            self._removed.append(_Evicted(step, ids, tables))

    def begin(self, step: int) -> None:
        """Clears the record, after states of this step were loaded."""
        self.bases, self._removed = {"": step}, []

    def rebase(self, step: int | None, *, by: str, now: int) -> None:
        """Sets that a consumer's incremental states reach back to ``step``, or None if there will be none.

        Evicted ids of steps before every consumer's base are dropped.

        Args:
            now: the step that has not ended.
        """
        self.bases = {name: at for name, at in {**self.bases, by: step}.items() if at is not None}
        first = min(self.bases.values(), default=now)
        self._removed = [some for some in self._removed if some.step >= first]

    def check(self, since: int | None) -> None:
        """Raises ValueError if the evicted ids since that step are not recorded."""
        first = min(self.bases.values(), default=None)
        if since is not None and (first is None or since < first):
            last = "there has been none" if first is None else f"that was at {first}"
            raise ValueError(f"a state since {since} wants a whole one at that version or before: {last}")

    def since(self, step: int | None, table: int) -> Tensor:
        """Returns a table's ids that were evicted since a step; none if ``step`` is None. int64 [n], ascending."""
        found = [np.empty(0, np.int64)]
        if step is not None:
            found += [some.ids[some.tables == table] for some in self._removed if some.step >= step]
        return torch.from_numpy(np.unique(np.concatenate(found)))

    def saved(self) -> tuple[dict[str, int], list[np.ndarray]]:
        """Returns the bases, and the ids evicted since the first of them: ids, tables and steps."""
        parts = [np.stack([some.ids, some.tables, np.full(len(some.ids), some.step)]) for some in self._removed]
        return dict(self.bases), list(np.concatenate([np.empty((3, 0), np.int64), *parts], axis=1))

    def restore(self, bases: Mapping[str, int], evicted: Sequence[np.ndarray]) -> None:
        """Restores the state that `saved` returned."""
        ids, tables, steps = evicted
        self.bases = dict(bases)
        self._removed = [
            _Evicted(step, ids[steps == step], tables[steps == step]) for step in np.unique(steps).tolist()
        ]
