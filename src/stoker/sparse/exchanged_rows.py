"""Rows sharded over the training processes: each owns those of some ids, and exchanges them by all-to-all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from stoker.sparse.eviction_pass import Candidates, EvictionPlan
from stoker.sparse.exchange import Route, send_keys
from stoker.sparse.table_keys import Keys
from stoker.sparse.table_settings import TableSettings
from stoker.sparse.table_shard import TableShard

ASK_OTHERS = 16  # steps between two exchanges of whether processes wait for their disks


@dataclass(frozen=True)
class _Lookup:
    """A lookup that needs gradients.

    Attributes:
        leaf: [n, width], this process' unique rows, which accumulate the gradient.
        owned: int64 [m], row numbers of the keys that this process has received.
        route: None if one process has all rows.
    """

    leaf: Tensor
    owned: np.ndarray
    route: Route | None


@dataclass(frozen=True)
class _Summed:
    """Gradients of a step by row.

    Attributes:
        rows: int64 [n], unique.
        grads: [n, width].
        values: [n, width]; None if they are not loaded.
    """

    rows: np.ndarray
    grads: Tensor
    values: Tensor | None


class ExchangedRows:
    """Rows of tables with one layout; each process stores a `TableShard`. Every method is a collective.

    Attributes:
        plans_evictions: whether this process plans eviction passes, alone or with all others.
    """

    plans_evictions = True

    def __init__(self, tables: Sequence[TableSettings], *, seed: int, group: dist.ProcessGroup | None) -> None:
        rank, world = (dist.get_rank(group), dist.get_world_size(group)) if group else (0, 1)
        self.shard = shard = TableShard(tables, seed=seed, rank=rank, world=world)
        self.state, self.lazy_parts, self.load = shard.state, shard.lazy_parts, shard.load  # of this process' rows
        self.rebase, self.counts = shard.rebase, shard.counts
        self._group = group
        self._lookups: list[_Lookup] = []
        self._summed: _Summed | None = None
        self._candidates: Candidates | None = None  # during an eviction pass
        self._asked, self._others_wait = 0, False  # calls of `prefetch`, and whether any process waits for its disk

    @property
    def step(self) -> int:
        """Number of completed steps."""
        return self.shard.step

    def rows(self, keys: Keys, *, training: bool) -> tuple[Tensor, np.ndarray]:
        """Returns the unique rows [unique, width] of keys, and the index of each key's row among them, int64 [n].

        In training, with gradients enabled, the rows are leaves whose gradients are applied by the step.
        """
        shard = self.shard
        if self._group is None:
            found = shard.look_up(keys) if training else shard.peek(keys)
            leaf = shard.values(found.unique)
            owned, inverse, route = found.unique, found.inverse, None
        else:
            inverse, counts, keys = keys.deduplicated()
            route, places, received, occurrences = send_keys(keys, counts, shard.salts, self._group)
            found = shard.look_up(received, occurrences) if training else shard.peek(received)
            owned = found.unique[found.inverse]
            leaf, inverse = route.rows_back(shard.values(owned)), places[inverse]
        if training and torch.is_grad_enabled():
            self._lookups.append(_Lookup(leaf.requires_grad_(), owned, route))
        return leaf, inverse

    def prefetch(self, keys: Keys) -> None:
        """Starts to load rows from files, if lookups of any process wait for the disk."""
        if self._group is not None:
            if self._asked % ASK_OTHERS == 0:
                waits = torch.tensor(int(self.shard.waits))
                dist.all_reduce(waits, dist.ReduceOp.MAX, group=self._group)
                self._others_wait = bool(waits)
            self._asked += 1
            if not self._others_wait:
                return
            _, counts, keys = keys.deduplicated()
            _, _, keys, _ = send_keys(keys, counts, self.shard.salts, self._group)
        self.shard.prefetch(keys)

    def gradients_are_finite(self) -> bool:
        """Returns whether the step's gradients of this process' rows are finite."""
        summed = self._gradients()
        return bool(summed.grads[torch.from_numpy(summed.rows >= self.shard.index.first)].isfinite().all())

    def apply(self, *, scale: float, lr_factor: float) -> None:
        """Updates this process' rows and ends the step."""
        summed = self._gradients()
        grads = summed.grads if scale == 1 else summed.grads * scale
        self.shard.update(summed.rows, grads, lr_factor=lr_factor, values=summed.values)
        self._forget()
        self.shard.end_step()

    def candidates(self, what: str, arrays: list[np.ndarray]) -> np.ndarray:
        """Returns the sum of all processes' answers."""
        self._candidates = self._candidates or Candidates(self.shard)
        found = torch.from_numpy(self._candidates.answer(what, arrays))
        if self._group is not None:
            dist.all_reduce(found, group=self._group)
        return found.numpy()

    def evict(self, plan: EvictionPlan | None) -> None:
        """Deletes rows."""
        assert plan is not None and self._candidates is not None
        self.shard.evict(self._candidates, plan)
        self._candidates = None

    def discard(self) -> None:
        """Drops the step's lookups, without ending the step."""
        self._forget()
        self.shard.undo_step()

    def _forget(self) -> None:
        self._lookups.clear()
        self._summed = None

    def end_load(self) -> None:
        """Does nothing: each process has its own rows."""

    def evicted(self) -> np.ndarray:
        """Returns the totals of evicted rows of each table."""
        return self.shard.evicted

    def _gradients(self) -> _Summed:
        """Returns the gradients of this process' rows, summed over all lookups and processes."""
        if self._summed is None:
            width, dtype = self.shard.tables[0].width, self.shard.format.compute
            rows, grads = [np.empty(0, np.int64)], [torch.empty(0, width, dtype=dtype)]
            for lookup in self._lookups:
                found = torch.zeros_like(lookup.leaf) if lookup.leaf.grad is None else lookup.leaf.grad
                grads.append(lookup.route.to_owners(found) if lookup.route else found)
                rows.append(lookup.owned)
            if len(self._lookups) == 1 and self._group is None:
                self._summed = _Summed(rows[1], grads[1], self._lookups[0].leaf.detach())
            else:
                self._summed = _Summed(*self.shard.sum_by_row(np.concatenate(rows), torch.cat(grads)), None)
            self._lookups.clear()
        return self._summed
