"""Versions of tables in Redis."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from stoker.online_store.row_backends import RedisBackend, StoredTable, StoreError
from stoker.online_store.store_version import ABANDONED, StoredVersion, TableDelta, head_of, info_of

CHUNK = 5000  # rows of a command
_PARTS = "head|manifest|file:[^:]+|rows:[0-9]+"  # of a version's keys


class RedisWriter:
    """Versions in Redis. Rows of a table are one hash, so that a version is dropped by a few commands.

    `LmdbWriter` describes the methods.
    """

    def __init__(self, place: str) -> None:
        self.place, self._at = place, RedisBackend(place)
        self._client, self._key = self._at.client, self._at.key

    def begin(self) -> int:
        for name, last in self._client.hgetall(self._key("loading")).items():
            if float(last) < time.time() - ABANDONED:
                self.drop(int(name))
        version = int(self._client.incr(self._key("last")))
        self._client.hset(self._key("loading"), str(version), time.time())
        return version

    def put(self, version: int, delta: TableDelta) -> None:
        if not self._client.hexists(self._key("loading"), str(version)):
            raise StoreError(f"version {version} is gone")
        self._client.hset(self._key("loading"), str(version), time.time())
        self._put(version, delta)

    def change(self, version: int, deltas: Sequence[TableDelta]) -> None:
        self._require(version)
        for delta in deltas:
            self._put(version, delta)
        self._require(version)

    def _require(self, version: int) -> None:
        """Checks that a version is there. Rows that were written after it was dropped are removed."""
        if not self._client.exists(self._key(version, "head")):
            self.drop(version)
            raise StoreError(f"version {version} is gone")

    def _put(self, version: int, delta: TableDelta) -> None:
        key = self._key(version, "rows", delta.table.number)
        for start in range(0, len(delta.ids), CHUNK):
            part = slice(start, start + CHUNK)
            self._send(hset_command(key.encode(), delta.ids[part], delta.rows[part]))
        for start in range(0, len(delta.removed), CHUNK):
            raw = delta.removed[start : start + CHUNK].astype("<i8").tobytes()
            self._client.execute_command("HDEL", key, *(raw[i : i + 8] for i in range(0, len(raw), 8)))

    def _send(self, command: list[bytes]) -> None:
        """Sends a command that is encoded already, and waits for its answer."""
        connection = self._client.connection_pool.get_connection()
        try:
            connection.send_packed_command(command)
            connection.read_response()
        except BaseException:
            connection.disconnect()
            raise
        finally:
            self._client.connection_pool.release(connection)

    def seal(self, version: int, manifest: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
        with self._client.pipeline(transaction=True) as pipeline:
            self._describe(pipeline, version, manifest, files)
            pipeline.execute()

    def _describe(self, pipeline: Any, version: int, manifest: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
        for name, content in files.items():
            pipeline.set(self._key(version, "file", name), content)
        pipeline.set(self._key(version, "manifest"), json.dumps(manifest))
        pipeline.set(self._key(version, "head"), head_of(manifest, version))

    @contextmanager
    def _while_there(self, version: int) -> Iterator[Any]:
        """A transaction on a version that is there until it is executed."""
        from redis import WatchError

        with self._client.pipeline(transaction=True) as pipeline:
            pipeline.watch(self._key(version, "head"))
            self._require(version)
            pipeline.multi()
            yield pipeline
            try:
                pipeline.execute()
            except WatchError:
                self._require(version)
                raise

    def update(
        self, version: int, deltas: Sequence[TableDelta], manifest: Mapping[str, Any], files: Mapping[str, bytes]
    ) -> None:
        self.change(version, deltas)
        with self._while_there(version) as pipeline:
            self._describe(pipeline, version, manifest, files)
            self._list(pipeline, version, manifest)

    def _list(self, pipeline: Any, version: int, manifest: Mapping[str, Any]) -> None:
        """Gives a version its entry among the versions."""
        pipeline.hset(self._key("versions"), str(version), info_of(manifest))
        pipeline.hdel(self._key("loading"), str(version))

    def switch(self, version: int) -> None:
        manifest = self._client.get(self._key(version, "manifest"))
        with self._while_there(version) as pipeline:
            self._list(pipeline, version, json.loads(manifest or "{}"))
            pipeline.set(self._key("current"), version)

    def drop(self, version: int) -> None:
        self._client.delete(self._key(version, "head"))  # readers begin with it
        for name in ("versions", "loading"):
            self._client.hdel(self._key(name), str(version))
        start = self._key(version, "")
        pattern = re.sub(r"([*?\[\]\\])", r"\\\1", start) + "*"
        own = re.compile(f"{re.escape(start)}({_PARTS})".encode())  # the pattern finds keys of a prefix like ads:2 too
        for key in self._client.scan_iter(pattern, count=1000):
            if own.fullmatch(key):
                self._client.unlink(key)

    def current(self) -> int:
        return self._at.current()

    def versions(self) -> list[StoredVersion]:
        found = self._client.hgetall(self._key("versions"))
        return sorted((StoredVersion(int(v), json.loads(info)) for v, info in found.items()), key=lambda v: v.number)

    def rows_of(self, version: int, table: StoredTable) -> int:
        return int(self._client.hlen(self._key(version, "rows", table.number)))


def hset_command(key: bytes, ids: np.ndarray, rows: np.ndarray) -> list[bytes]:
    """Returns an HSET of many rows in Redis' protocol (RESP2), laid out by NumPy: redis-py packs word by word.

    Args:
        rows: uint8 [n, row bytes].
    """
    count, size = rows.shape
    head = b"*%d\r\n$4\r\nHSET\r\n$%d\r\n%b\r\n" % (2 + 2 * count, len(key), key)
    between = b"\r\n$%d\r\n" % size
    block = np.empty((count, 4 + 8 + len(between) + size + 2), np.uint8)
    at = 0
    for part in (b"$8\r\n", ids.astype("<i8").view(np.uint8).reshape(count, 8), between, rows, b"\r\n"):
        wide = len(part) if isinstance(part, bytes) else part.shape[1]
        block[:, at : at + wide] = np.frombuffer(part, np.uint8) if isinstance(part, bytes) else part
        at += wide
    return [head, block.tobytes()]
