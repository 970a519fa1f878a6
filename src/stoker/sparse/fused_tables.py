"""Tables with one layout, whose rows are looked up and pooled together for all of their features."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from stoker.sparse.exchanged_rows import ExchangedRows
from stoker.sparse.jagged_ids import JaggedIds
from stoker.sparse.pooling import pool
from stoker.sparse.servers.served_rows import ServedRows
from stoker.sparse.table_keys import NO_KEYS, Keys, salts_of
from stoker.sparse.table_settings import TableSettings
from stoker.sparse.value_format import RowFormat

Pooling = Literal["sum", "mean", "none"]
TableRows = ExchangedRows | ServedRows


@dataclass(frozen=True)
class Feature:
    """The lookup of a feature: its table, and the pooling of its rows to the model's tensor.

    Attributes:
        table: name of the table; several features may share one.
        pooling: ``sum`` or ``mean`` give [batch, width], with 0 for a sample without ids; a mean with weights is
            divided by their sum. ``none`` gives [batch, longest, width], with zeros after a sample's last id.
        longest: for ``none``: maximum number of a sample's ids, of which the last ones are kept; None for the longest
            of a batch.
    """

    table: str
    pooling: Pooling = "sum"
    longest: int | None = None


@dataclass(frozen=True)
class Bags:
    """Ids of all features in one array.

    Attributes:
        lengths: int64 [bags], number of ids in each bag, feature by feature.
        shapes: shape of each feature's bags.
    """

    keys: Keys
    lengths: np.ndarray
    weights: Tensor | None
    shapes: Mapping[str, tuple[int, ...]]


class FeatureBags:
    """Features of tables with one layout: the keys that a batch looks up, and the pooling of their rows."""

    def __init__(
        self,
        tables: Sequence[TableSettings],
        features: Mapping[str, Feature],
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._salts, self._device, self._dtype = salts_of(tables), device, dtype
        self._numbers = {table.name: number for number, table in enumerate(tables)}
        self._features = {name: feature for name, feature in features.items() if feature.table in self._numbers}
        self._compute = RowFormat(tables[0].dtype, tables[0].width).compute

    def __bool__(self) -> bool:
        return bool(self._features)

    def pooled(self, bags: Bags, rows: Tensor, inverse: np.ndarray) -> dict[str, Tensor]:
        """Pools rows [unique, width] for each feature; ``inverse`` gives each key's row."""
        sizes = [math.prod(shape) for shape in bags.shapes.values()]
        parts = pool(rows, inverse, bags.lengths, bags.weights, sizes)
        if (self._device, self._dtype) != (rows.device, rows.dtype):  # in one conversion
            parts = torch.cat(parts).to(self._device, self._dtype).split(sizes)
        return {name: part.unflatten(0, shape) for (name, shape), part in zip(bags.shapes.items(), parts, strict=True)}

    def keys(self, batch: Mapping[str, JaggedIds]) -> dict[str, Keys]:
        """Returns the keys of a batch by feature, in the order of the ids; of these tables' features only."""
        found = {}
        for name in batch.keys() & self._features.keys():
            ids = batch[name].ids.numpy()
            found[name] = Keys.of(ids, np.full(len(ids), self._numbers[self._features[name].table]), self._salts)
        return found

    def ids(self, batch: Mapping[str, JaggedIds]) -> list[JaggedIds]:
        """Returns the ids of these tables' features, in order."""
        return [batch[name] for name in self._features]

    def bags(self, batch: Mapping[str, JaggedIds]) -> Bags:
        """Concatenates the ids of these tables' features in a batch."""
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
                if feature.pooling == "mean" and (factors is not None or (counts > 1).any()):
                    factors = _mean_weights(counts, factors)
            ids.append(own)
            tables.append(self._numbers[feature.table])
            lengths.append(counts)
            weights.append(factors)
        factor = None
        if any(one is not None for one in weights):
            filled = [np.ones(len(own)) if one is None else one for one, own in zip(weights, ids, strict=True)]
            factor = torch.from_numpy(np.concatenate(filled)).to(self._compute)
        numbers = np.repeat(tables, [len(own) for own in ids])
        keys = Keys.of(np.concatenate(ids), numbers, self._salts)
        return Bags(keys, np.concatenate(lengths), factor, shapes)


class FusedTables:
    """Tables of one layout and the features that look ids up in them.

    Attributes:
        source: the storage of the rows.
        features: the features that look up these tables.
    """

    def __init__(
        self,
        tables: Sequence[TableSettings],
        features: Mapping[str, Feature],
        source: TableRows,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.tables, self.source = tuple(tables), source
        self.features = FeatureBags(tables, features, device=device, dtype=dtype)
        self._ahead: list[tuple[list[JaggedIds], Bags]] = []  # prefetched batches

    def look_up(self, batch: Mapping[str, JaggedIds], *, training: bool) -> dict[str, Tensor]:
        """Returns the pooled rows of each feature. A collective."""
        if not self.features:
            return {}
        bags = self._known(batch) or self.features.bags(batch)
        return self.features.pooled(bags, *self.source.rows(bags.keys, training=training))

    def prefetch(self, batches: Sequence[Mapping[str, JaggedIds]]) -> None:
        """Starts to load the rows of coming batches from the disk. A collective."""
        if self.tables[0].disk is None or not self.features:
            return
        self._ahead = [(self.features.ids(batch), self.features.bags(batch)) for batch in batches]
        self.source.prefetch(Keys.concatenated([NO_KEYS, *(bags.keys for _, bags in self._ahead)]))

    def _known(self, batch: Mapping[str, JaggedIds]) -> Bags | None:
        """Returns the bags of a prefetched batch, which is recognised by its objects; None for other batches."""
        if not self._ahead:
            return None
        ids = self.features.ids(batch)
        same = (bags for known, bags in self._ahead if all(a is b for a, b in zip(known, ids, strict=True)))
        return next(same, None)


def _padded(counts: np.ndarray, longest: int | None) -> tuple[np.ndarray | None, np.ndarray, tuple[int, int]]:
    """Splits samples into bags of at most one id; returns the kept ids (None for all), the lengths, and the shape."""
    cut = counts if longest is None else np.minimum(counts, longest)
    kept = None
    if (cut != counts).any():
        ends = np.cumsum(counts)
        kept = np.flatnonzero(np.arange(counts.sum()) >= np.repeat(ends - cut, counts))
    width = int(cut.max(initial=0)) if longest is None else longest
    return kept, (np.arange(width) < cut[:, None]).reshape(-1).astype(np.int64), (len(counts), width)


def _mean_weights(counts: np.ndarray, factors: np.ndarray | None) -> np.ndarray:
    """Returns the weights with which a sum is a mean; 0 for samples whose weights sum to 0."""
    if factors is None:
        return np.repeat(1 / np.maximum(counts, 1), counts)
    samples = np.repeat(np.arange(len(counts)), counts)
    sums = np.bincount(samples, factors, len(counts))[samples]
    return np.divide(factors, sums, out=np.zeros_like(factors), where=sums != 0)
