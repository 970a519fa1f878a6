"""Finds the ids that have a row in a store."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from stoker.online_store.row_backends import StoreError
from stoker.online_store.row_reader import TRIES, RowReader


def is_stored(reader: RowReader, ids: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns which of int64 ids [n] have a row in the reader's version, bool [n] by table; reads the store's current
    rows.

    Raises:
        StoreError: there is no such table, or versions change too fast.
    """
    unique = {name: np.unique(np.asarray(own, np.int64), return_inverse=True) for name, own in ids.items()}
    for _ in range(TRIES):
        if absent := ids.keys() - reader.tables.keys():
            raise StoreError(f"there is no table {sorted(absent)[0]!r}; there are {sorted(reader.tables)}")
        wanted = {reader.tables[name]: keys for name, (keys, _) in unique.items()}
        _, head, read = reader.backend.read(reader.version, wanted)
        if head is not None:
            there = {table.name: read[table.number][0] for table, keys in wanted.items() if len(keys)}
            none = np.zeros(0, bool)
            return {name: there.get(name, none)[inverse] for name, (_, inverse) in unique.items()}
        reader.refresh()  # the version no longer exists
    raise StoreError(f"the versions of {reader.place} change faster than they can be read")
