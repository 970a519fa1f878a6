"""Versions of tables in LMDB."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from stoker.online_store.row_backends import LmdbBackend, StoredTable, StoreError, lmdb_keys
from stoker.online_store.store_version import ABANDONED, StoredVersion, TableDelta, head_of, info_of

CHUNK = 200_000  # rows of a transaction


class LmdbWriter:
    """Versions in LMDB, one database each. Readers see transactions whole, in other processes too.

    A change of one version never affects another one. `RedisWriter` has the same methods.
    """

    def __init__(self, place: str) -> None:
        self.place, self._at = place, LmdbBackend(place, write=True)
        self._meta, self._opened = self._made("meta"), dict[int, Any]()

    def _made(self, name: str) -> Any:
        """Opens or creates a database. Its transaction begins first, where waiting blocks no other thread."""
        transaction = self._at.environment.begin(write=True)
        try:
            with self._at.opening:
                database = self._at.environment.open_db(name.encode(), txn=transaction, create=True)
                transaction.commit()
        except BaseException:
            transaction.abort()
            raise
        return database

    def _rows(self, version: int) -> Any:
        """Returns the database of a version's rows."""
        if version not in self._opened:
            self._opened[version] = self._made(f"rows:{version}")
        return self._opened[version]

    def begin(self) -> int:
        """Returns the number of a new version, which no reader sees."""
        self._forget_dead_readers()
        for version in self._abandoned():
            self.drop(version)
        with self._at.environment.begin(self._meta, write=True) as transaction:
            version = int(transaction.get(b"last") or 0) + 1
            transaction.put(b"last", str(version).encode())
            transaction.put(f"loading:{version}".encode(), str(time.time()).encode())
        self._rows(version)
        return version

    def _forget_dead_readers(self) -> None:
        """Ends the transactions of readers that were killed, which would keep all later pages from reuse."""
        self._at.environment.reader_check()

    def _abandoned(self) -> list[int]:
        with self._at.environment.begin(self._meta) as transaction, transaction.cursor() as cursor:
            found = [(key, value) for key, value in cursor if key.startswith(b"loading:")]
        return [int(key[8:]) for key, last in found if float(last) < time.time() - ABANDONED]

    def put(self, version: int, delta: TableDelta) -> None:
        """Writes rows of a version that no reader sees yet, and deletes others.

        Raises:
            StoreError: the version was not begun in this store, or is gone.
        """
        with self._at.environment.begin(self._meta) as transaction:
            self._require(transaction, "loading", version)
        rows = self._rows(version)
        for start in range(0, max(len(delta.ids), 1), CHUNK):
            part = slice(start, start + CHUNK)
            with self._at.environment.begin(write=True) as transaction:
                self._require(transaction, "loading", version)
                self._put(transaction, rows, TableDelta(delta.table, delta.ids[part], delta.rows[part], delta.removed))
                transaction.put(f"loading:{version}".encode(), str(time.time()).encode(), db=self._meta)

    def _require(self, transaction: Any, entry: str, version: int) -> None:
        """Checks that a version has its entry, ``loading`` or ``info``, and so has not been removed."""
        if transaction.get(f"{entry}:{version}".encode(), db=self._meta) is None:
            raise StoreError(f"version {version} is gone")

    def _put(self, transaction: Any, rows: Any, delta: TableDelta) -> None:
        size, raw = delta.table.row_bytes, np.ascontiguousarray(delta.rows).tobytes()
        values = (raw[i : i + size] for i in range(0, len(raw), size))
        with transaction.cursor(rows) as cursor:
            cursor.putmulti(list(zip(lmdb_keys(delta.table.number, delta.ids), values, strict=True)))
        for key in lmdb_keys(delta.table.number, delta.removed):
            transaction.delete(key, db=rows)

    def seal(self, version: int, manifest: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
        """Makes a version readable by its number; `versions` has it once `switch` has made it current."""
        with self._at.environment.begin(self._meta, write=True) as transaction:
            self._describe(transaction, version, manifest, files)

    def _describe(
        self, transaction: Any, version: int, manifest: Mapping[str, Any], files: Mapping[str, bytes]
    ) -> None:
        entries = {f"{version}:file:{name}": content for name, content in files.items()}
        entries[f"{version}:manifest"] = json.dumps(manifest).encode()
        entries[f"{version}:head"] = head_of(manifest, version).encode()
        for key, value in entries.items():
            transaction.put(key.encode(), value, db=self._meta)

    def _list(self, transaction: Any, version: int, manifest: Mapping[str, Any]) -> None:
        """Gives a version its entry among the versions."""
        transaction.put(f"info:{version}".encode(), info_of(manifest).encode(), db=self._meta)
        transaction.delete(f"loading:{version}".encode(), db=self._meta)

    def update(
        self, version: int, deltas: Sequence[TableDelta], manifest: Mapping[str, Any], files: Mapping[str, bytes]
    ) -> None:
        """Changes a version that is read, all at one moment; in Redis the rows first.

        Raises:
            StoreError: the version is gone.
        """
        with self._changing(version, deltas) as transaction:
            self._describe(transaction, version, manifest, files)
            self._list(transaction, version, manifest)

    def change(self, version: int, deltas: Sequence[TableDelta]) -> None:
        """Writes rows of a version that is read; what else belongs to the change follows by `update`.

        Raises:
            StoreError: the version is gone.
        """
        with self._changing(version, deltas):
            pass

    @contextmanager
    def _changing(self, version: int, deltas: Sequence[TableDelta]) -> Iterator[Any]:
        """A transaction that updates rows of a version."""
        with self._at.environment.begin(self._meta) as transaction:
            self._require(transaction, "info", version)
        rows = self._rows(version)
        self._forget_dead_readers()
        with self._at.environment.begin(write=True) as transaction:
            self._require(transaction, "info", version)
            for delta in deltas:
                self._put(transaction, rows, delta)
            yield transaction

    def switch(self, version: int) -> None:
        """Makes a version the current one.

        Raises:
            StoreError: the version is gone.
        """
        with self._at.environment.begin(self._meta, write=True) as transaction:
            manifest = transaction.get(f"{version}:manifest".encode())
            if manifest is None:
                raise StoreError(f"version {version} is gone")
            self._list(transaction, version, json.loads(manifest))
            transaction.put(b"current", str(version).encode())

    def drop(self, version: int) -> None:
        """Removes a version, or an incomplete one."""
        rows = self._rows(version)
        with self._at.environment.begin(write=True) as transaction:
            with transaction.cursor(self._meta) as cursor:
                keys = [key for key in cursor.iternext(values=False) if key.startswith(f"{version}:".encode())]
            for key in (*keys, f"info:{version}".encode(), f"loading:{version}".encode()):
                transaction.delete(key, db=self._meta)
            transaction.drop(rows, delete=True)
        del self._opened[version]

    def current(self) -> int:
        """Returns the current version; 0 if there is none."""
        return self._at.current()

    def versions(self) -> list[StoredVersion]:
        """Returns the versions that are or were current, ascending."""
        with self._at.environment.begin(self._meta) as transaction, transaction.cursor() as cursor:
            found = [(int(key[5:]), json.loads(value)) for key, value in cursor if key.startswith(b"info:")]
        return sorted((StoredVersion(*one) for one in found), key=lambda version: version.number)

    def rows_of(self, version: int, table: StoredTable) -> int:
        """Returns the number of rows of a table."""
        rows, count = self._rows(version), 0
        with self._at.environment.begin(rows) as transaction, transaction.cursor() as cursor:
            if cursor.set_range(table.number.to_bytes(2, "big")):
                for key in cursor.iternext(values=False):
                    if key[:2] != table.number.to_bytes(2, "big"):
                        break
                    count += 1
        return count
