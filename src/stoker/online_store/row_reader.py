"""Reads the rows of an exported ranking model by id: from a folder of sorted shards, from LMDB, or from Redis.

    reader = RowReader("redis://127.0.0.1:6379/0", cache_rows=1_000_000, cache_seconds=1.0)
    vectors = reader.rows({"user_id": ids, "item_id": other_ids})       # one round trip; float32 [n, width] each

An id without a row has its table's default row, zeros unless the manifest has another. This file and `row_backends`
import nothing else of Stoker: NumPy, and `redis` or `lmdb` for these stores, so that both can be copied into a service.
`docs/sparse-serving.md` describes the format of keys.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from stoker.online_store.row_backends import FolderBackend, StoredTable, StoreError, backend_of, tables_of

TRIES = 8  # to read while versions change


class _RowCache:
    """A cache of a table's rows by id, direct-mapped: a later id evicts the earlier one from its slot."""

    def __init__(self, table: StoredTable, slots: int, seconds: float) -> None:
        self._mask, self._seconds = np.uint64((1 << (max(1, slots) - 1).bit_length()) - 1), seconds
        size = int(self._mask) + 1
        self._ids, self._until = np.zeros(size, np.int64), np.zeros(size)
        self._rows: np.ndarray = np.zeros((size, table.width), table.decoded)

    def _slots(self, ids: np.ndarray) -> np.ndarray:
        mixed = ids.view(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        return ((mixed >> np.uint64(32)) & self._mask).view(np.int64)

    def find(self, ids: np.ndarray, now: float) -> tuple[np.ndarray, np.ndarray]:
        """Returns which ids are cached, and the rows of all slots."""
        slots = self._slots(ids)
        return (self._ids[slots] == ids) & (self._until[slots] > now), self._rows[slots]

    def keep(self, ids: np.ndarray, rows: np.ndarray, now: float) -> None:
        slots = self._slots(ids)
        self._ids[slots], self._rows[slots] = ids, rows
        self._until[slots] = now + self._seconds  # equal slots: the last of each assignment stays


class RowReader:
    """Reads rows by id, of the current version of a store or of a fixed one.

    Args:
        place: a folder, ``lmdb://PATH`` or ``redis://HOST:PORT/DB``.
        version: the version to read; None for the current one, also after it changes.
        cache_rows: rows of each table that are cached here; 0 for none. Folders need no cache.
        cache_seconds: expiry of a cached row, and so the maximum age of a row when it is used.

    Attributes:
        head: version and update, as of the last read.
        backend: the store's backend.

    Raises:
        StoreError: there is nothing to read.
    """

    def __init__(
        self, place: str, *, version: int | None = None, cache_rows: int = 0, cache_seconds: float = 1.0
    ) -> None:
        self.place, self.backend, self._fixed = place, backend_of(place), version
        self._slots, self._seconds = cache_rows * (not isinstance(self.backend, FolderBackend)), cache_seconds
        self._lock = threading.Lock()
        self._caches: dict[str, _RowCache] = {}
        self.version, self.manifest = 0, dict[str, Any]()
        self.refresh()

    def refresh(self) -> None:
        """Takes over the current version, and its manifest."""
        for _ in range(TRIES):
            version = self._fixed if self._fixed is not None else self.backend.current()
            head, manifest = self.backend.read(version, {})[1], self.backend.manifest(version)
            if manifest is not None:
                break
        else:
            raise StoreError(f"{self.place} has no version {version}" if version else f"{self.place} is empty")
        if (self.version, self.manifest.get("id")) != (version, manifest.get("id")):
            self._caches = {}
        self.version, self.manifest, self.tables = version, manifest, tables_of(manifest)
        self.head = head  # read before the manifest, which is as new at least

    def file(self, name: str) -> bytes:
        """Returns a file of the version, such as the tower's weights."""
        if content := self.backend.file(self.version, name):
            return content
        raise StoreError(f"{self.place} has no {name} of version {self.version}")

    def rows(self, ids: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns rows [n, width] of int64 ids [n] by table, or the default row; one round trip for uncached rows.

        Raises:
            StoreError: there is no such table, or versions change too fast.
        """
        with self._lock:
            for _ in range(TRIES):
                if (found := self._try(ids)) is not None:
                    return found
                self.refresh()
        raise StoreError(f"the versions of {self.place} change faster than they can be read")

    def _try(self, ids: Mapping[str, np.ndarray]) -> dict[str, np.ndarray] | None:
        """Reads the rows of ids; returns None if the version has changed in the meantime."""
        if missing := ids.keys() - self.tables.keys():
            raise StoreError(f"there is no table {sorted(missing)[0]!r}; there are {sorted(self.tables)}")
        now, wanted, out = time.monotonic(), {}, {}
        for name, own in ids.items():
            table = self.tables[name]
            unique, inverse = np.unique(np.asarray(own, np.int64), return_inverse=True)
            there = np.zeros(len(unique), bool)
            rows: np.ndarray = np.zeros((len(unique), table.width), table.decoded)
            if self._slots:
                cache = self._caches.setdefault(name, _RowCache(table, self._slots, self._seconds))
                there, rows = cache.find(unique, now)
            wanted[table] = unique[~there]
            out[name] = (inverse, there, rows)
        current, head, read = self.backend.read(self.version, wanted)
        if head is None or (self._fixed is None and current != self.version):
            return None
        if head != self.head:  # an update, which may have brought other default rows
            manifest = self.backend.manifest(self.version) or self.manifest
            if manifest.get("id") != self.manifest.get("id"):  # another version under the same number
                return None
            self.manifest, self.head, self.tables = manifest, head, tables_of(manifest)
        for table, asked in wanted.items():
            if len(asked):
                found, raw = read[table.number]
                fetched = self.tables[table.name].default_rows(len(asked))
                fetched[found] = table.decode(raw)
                _, there, rows = out[table.name]
                rows[~there] = fetched
                if self._slots:
                    self._caches[table.name].keep(asked, fetched, now)
        return {name: rows[inverse] for name, (inverse, _, rows) in out.items()}
