"""Tables with one layout, looked up, pooled and updated together, over all processes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from stoker.sparse.exchange import Route, send_keys
from stoker.sparse.id_index import IdIndex
from stoker.sparse.jagged_ids import JaggedIds
from stoker.sparse.keys import Keys
from stoker.sparse.pooling import pool
from stoker.sparse.table_settings import TableSettings
from stoker.sparse.table_shard import TableShard

Pooling = Literal["sum", "mean", "none"]


@dataclass(frozen=True)
class Feature:
    """How the rows of a feature's ids become the tensor that a model gets.

    Attributes:
        table: name; several features may share one.
        pooling: ``sum`` or ``mean`` give [batch, width], with 0 for a sample without ids; a mean with weights is
            divided by their sum. ``none`` gives [batch, longest, width], with zeros after a sample's last id.
        longest: for ``none``: ids of a sample at most, of which the last ones are kept; None for the longest of a
            batch.
    """

    table: str
    pooling: Pooling = "sum"
    longest: int | None = None


@dataclass(frozen=True)
class _Lookup:
    """A lookup whose gradients are wanted.

    Attributes:
        leaf: [n, width], this process' unique rows, which collect the gradient.
        owned: int64 [m], row numbers of the keys that this process has received.
        route: None where one process has all rows.
    """

    leaf: Tensor
    owned: np.ndarray
    route: Route | None


@dataclass(frozen=True)
class _Summed:
    """Gradients of a step by row.

    Attributes:
        rows: int64 [n], each once.
        grads: [n, width].
        values: [n, width], where they are at hand.
    """

    rows: np.ndarray
    grads: Tensor
    values: Tensor | None


@dataclass(frozen=True)
class _Bags:
    """Ids of all features in one row.

    Attributes:
        lengths: int64 [bags], feature by feature.
        shapes: of each feature's bags.
    """

    keys: Keys
    lengths: np.ndarray
    weights: Tensor | None
    shapes: Mapping[str, tuple[int, ...]]


class FusedTables:
    """Tables of one layout and the features that look ids up in them."""

    def __init__(
        self,
        tables: Sequence[TableSettings],
        features: Mapping[str, Feature],
        *,
        seed: int,
        group: dist.ProcessGroup | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._device, self._dtype = device, dtype
        rank, world = (dist.get_rank(group), dist.get_world_size(group)) if group else (0, 1)
        self.shard = TableShard(tables, seed=seed, rank=rank, world=world)
        self._numbers = {table.name: number for number, table in enumerate(tables)}
        self._features, self._group = dict(features), group
        self._lookups: list[_Lookup] = []
        self._summed: _Summed | None = None

    def look_up(self, batch: Mapping[str, JaggedIds], *, training: bool) -> dict[str, Tensor]:
        """Pooled rows of each feature. A collective."""
        bags = self._bags(batch)
        rows, inverse = self._rows(bags.keys, training)
        pooled = pool(rows, inverse, bags.lengths, bags.weights)
        pooled = pooled.to(self._device, self._dtype)
        parts = pooled.split([math.prod(shape) for shape in bags.shapes.values()])
        return {name: part.unflatten(0, shape) for (name, shape), part in zip(bags.shapes.items(), parts, strict=True)}

    def prefetch(self, batch: Mapping[str, JaggedIds]) -> None:
        """Begins to bring the rows of a coming batch from the disk. A collective."""
        if self.shard.tables[0].disk is None:
            return
        keys = self._bags(batch).keys
        if self._group is not None:
            _, counts, keys = _deduplicated(keys, self.shard.salts)
            _, keys, _ = send_keys(keys, counts, self.shard.salts, self._group)
        self.shard.prefetch(keys)

    def gradients(self) -> Tensor:
        """Sums this step's gradients by row, where each is owned. A collective.

        Returns:
            [rows, width], of this process' rows; they are kept for `apply`, and may be changed in place.
        """
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
        return self._summed.grads

    def apply(self, *, scale: float, lr_factor: float) -> None:
        """Updates this process' rows and ends the step. A collective."""
        grads = self.gradients()
        assert self._summed is not None
        if scale != 1:
            grads = grads * scale
        self.shard.update(self._summed.rows, grads, lr_factor=lr_factor, values=self._summed.values)
        self.discard()

    def discard(self) -> None:
        """Forgets this step's gradients and ends the step."""
        self._lookups.clear()
        self._summed = None
        self.shard.end_step()

    def _rows(self, keys: Keys, training: bool) -> tuple[Tensor, np.ndarray]:
        """Unique rows, and the place of each key's among them."""
        shard = self.shard
        if self._group is None:
            found = shard.look_up(keys) if training else shard.peek(keys)
            leaf = shard.values(found.unique)
            owned, inverse, route = found.unique, found.inverse, None
        else:
            inverse, counts, keys = _deduplicated(keys, shard.salts)
            route, received, occurrences = send_keys(keys, counts, shard.salts, self._group)
            found = shard.look_up(received, occurrences) if training else shard.peek(received)
            owned = found.unique[found.inverse]
            leaf = route.rows_back(shard.values(owned))
        if training and torch.is_grad_enabled():
            self._lookups.append(_Lookup(leaf.requires_grad_(), owned, route))
        return leaf, inverse

    def _bags(self, batch: Mapping[str, JaggedIds]) -> _Bags:
        ids, tables, lengths, weights = [], [], [], []
        shapes: dict[str, tuple[int, ...]] = {}
        for name, feature in self._features.items():
            jagged = batch[name]
            counts, own = jagged.lengths.numpy(), jagged.ids.numpy()
            factors = None if jagged.weights is None else jagged.weights.numpy().astype(np.float64)
            if feature.pooling == "none":
                kept, counts, shapes[name] = _padded(counts, feature.longest)
                if kept is not None:
                    own, factors = own[kept], factors if factors is None else factors[kept]
            else:
                shapes[name] = (len(counts),)
                if (feature.pooling == "mean" and (counts > 1).any()) or (
                    feature.pooling == "mean" and factors is not None
                ):
                    factors = _mean_weights(counts, factors)
            ids.append(own)
            tables.append(np.full(len(own), self._numbers[feature.table]))
            lengths.append(counts)
            weights.append(factors)
        factor = None
        if any(one is not None for one in weights):
            filled = [np.ones(len(own)) if one is None else one for one, own in zip(weights, ids, strict=True)]
            factor = torch.from_numpy(np.concatenate(filled)).to(self.shard.format.compute)
        keys = Keys.of(np.concatenate(ids), np.concatenate(tables), self.shard.salts)
        return _Bags(keys, np.concatenate(lengths), factor, shapes)


def _padded(counts: np.ndarray, longest: int | None) -> tuple[np.ndarray | None, np.ndarray, tuple[int, int]]:
    """Bags of one id or none: which ids are kept (None for all), the bags' lengths, and their shape."""
    cut = counts if longest is None else np.minimum(counts, longest)
    kept = None
    if (cut != counts).any():
        ends = np.cumsum(counts)
        kept = np.flatnonzero(np.arange(counts.sum()) >= np.repeat(ends - cut, counts))
    width = int(cut.max(initial=0)) if longest is None else longest
    return kept, (np.arange(width) < cut[:, None]).reshape(-1).astype(np.int64), (len(counts), width)


def _mean_weights(counts: np.ndarray, factors: np.ndarray | None) -> np.ndarray:
    """Factors with which a sum is a mean; where they sum to 0, 0."""
    if factors is None:
        return np.repeat(1 / np.maximum(counts, 1), counts)
    samples = np.repeat(np.arange(len(counts)), counts)
    sums = np.bincount(samples, factors, len(counts))[samples]
    return np.divide(factors, sums, out=np.zeros_like(factors), where=sums != 0)


def _deduplicated(keys: Keys, salts: np.ndarray) -> tuple[np.ndarray, np.ndarray, Keys]:
    """The place of each key among the unique ones, how often each of these occurs, and themselves."""
    inverse = IdIndex(salts).insert(keys.ids, keys.tables, keys.hashes) - 1
    counts = np.bincount(inverse)
    first = np.empty(len(counts), np.int64)
    first[inverse[::-1]] = np.arange(len(keys))[::-1]
    return inverse, counts, keys[first]
