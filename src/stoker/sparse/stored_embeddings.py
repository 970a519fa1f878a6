"""Embedding tables in a store: the same lookups as in training, of read-only rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from stoker.online_store.row_backends import StoredTable, StoreError
from stoker.online_store.row_reader import RowReader
from stoker.online_store.stored_ids import is_stored
from stoker.sparse.fused_tables import Feature, FeatureBags
from stoker.sparse.jagged_ids import JaggedIds
from stoker.sparse.sparse_state import TableState
from stoker.sparse.table_keys import Keys
from stoker.sparse.table_settings import TableSettings, by_layout
from stoker.sparse.value_format import RowFormat


class StoredEmbeddings:
    """Looks features up in a store, all of them in one round trip. The result equals that of `SparseEmbeddings`.

    Args:
        tables: only their names, widths and types are used.
        reader: whose tables have these names.
        dtype: of the result.
    """

    def __init__(
        self, tables: Sequence[TableSettings], features: Mapping[str, Feature], reader: RowReader, dtype: torch.dtype
    ) -> None:
        self.reader, self._features = reader, dict(features)
        self._layouts = []
        for own in by_layout(tables):
            bags = FeatureBags(own, features, device=torch.device("cpu"), dtype=dtype)
            if bags:
                self._layouts.append((own, bags))

    def __call__(self, ids: Mapping[str, JaggedIds]) -> dict[str, Tensor]:
        """Returns the pooled rows of each feature's ids; zeros for ids without a row.

        Raises:
            StoreError: the store cannot be read.
        """
        asked = []
        wanted: dict[str, np.ndarray] = {}
        for tables, features in self._layouts:
            bags = features.bags(ids)
            inverse, _, keys = bags.keys.deduplicated()
            places = [np.flatnonzero(keys.tables == number) for number in range(len(tables))]
            wanted |= {table.name: keys.ids[at] for table, at in zip(tables, places, strict=True)}
            asked.append((tables, features, bags, inverse, keys, places))
        rows = self.reader.rows(wanted)
        found: dict[str, Tensor] = {}
        for tables, features, bags, inverse, keys, places in asked:
            found |= features.pooled(bags, _placed(tables, keys, places, rows), inverse)
        return {name: found[name] for name in self._features}

    def found(self, ids: Mapping[str, JaggedIds]) -> dict[str, np.ndarray]:
        """Returns which ids of each feature have a row in the store, bool [n]; the others get zeros.

        Raises:
            StoreError: the store cannot be read.
        """
        names: dict[str, list[str]] = {}
        for name in ids:
            names.setdefault(self._features[name].table, []).append(name)
        asked = {table: [ids[name].ids.numpy() for name in own] for table, own in names.items()}
        there = is_stored(self.reader, {table: np.concatenate(parts) for table, parts in asked.items()})
        found: dict[str, np.ndarray] = {}
        for table, own in names.items():
            ends = np.cumsum([len(part) for part in asked[table]])[:-1]
            found |= zip(own, np.split(there[table], ends), strict=True)
        return found


def _placed(
    tables: Sequence[TableSettings], keys: Keys, places: Sequence[np.ndarray], rows: Mapping[str, np.ndarray]
) -> Tensor:
    """Returns rows [unique, width] in the order of the keys.

    Raises:
        StoreError: rows have another width than their table.
    """
    leaf = torch.empty(len(keys), tables[0].width, dtype=RowFormat(tables[0].dtype, tables[0].width).compute)
    for table, at in zip(tables, places, strict=True):
        found = rows[table.name]
        if found.shape[1] != table.width:  # of a version that has just become the current one
            raise StoreError(f"rows of table {table.name!r} have {found.shape[1]} numbers, and had {table.width}")
        leaf[torch.from_numpy(at)] = torch.from_numpy(found)
    return leaf


def stored_tables(tables: Sequence[TableSettings]) -> dict[str, StoredTable]:
    """Returns the tables as a store describes them, by name."""
    return {table.name: StoredTable(n, table.name, table.width, table.dtype) for n, table in enumerate(tables)}


def stored_rows(state: TableState) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ids of a state, and their rows as bytes, uint8 [n, row bytes]."""
    return state.ids.numpy(), state.values.contiguous().numpy().view(np.uint8)
