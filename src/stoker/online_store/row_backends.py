"""The backends that rows of an exported ranking model are read from: a folder of sorted shards, LMDB, or Redis.

Imports nothing of Stoker; see `row_reader`.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import numpy as np

FORMAT = 2  # of manifests and keys; those of format 1 have no default rows
MAP_SIZE = 1 << 40  # maximum size of an LMDB file in bytes; the file is as long as its content
STORED_TYPES = {"float64": np.float64, "float32": np.float32, "float16": np.float16, "int8": np.int8}
WIDEST = 1 << 20  # numbers of a row
_SCALE = 4  # bytes of the float32 behind an int8 row
_SIGN = np.uint64(1 << 63)
_Read = dict[int, tuple[np.ndarray, np.ndarray]]  # by table: which ids have rows, and these rows' bytes


class StoreError(Exception):
    """A store that cannot be read or written, with the reason."""


@dataclass(frozen=True)
class StoredTable:
    """A table in a store.

    Attributes:
        number: its place in the manifest.
        dtype: of stored rows; int8 rows end in their scale, a float32.
        default: the row of ids that have none; empty for zeros.
    """

    number: int
    name: str
    width: int
    dtype: str
    default: tuple[float, ...] = ()

    @property
    def row_bytes(self) -> int:
        return self.width * np.dtype(STORED_TYPES[self.dtype]).itemsize + (_SCALE if self.dtype == "int8" else 0)

    @property
    def decoded(self) -> type:
        """The type of rows in arithmetic."""
        return np.float64 if self.dtype == "float64" else np.float32

    def default_rows(self, count: int) -> np.ndarray:
        """Returns the default row, repeated ``count`` times, [count, width]."""
        return np.tile(np.array(self.default or (0.0,) * self.width, self.decoded), (count, 1))

    def decode(self, raw: np.ndarray) -> np.ndarray:
        """Converts the bytes of rows, uint8 [n, row_bytes], to rows [n, width]."""
        if self.dtype == "int8":
            scale = raw[:, self.width :].copy().view(np.float32)
            return raw[:, : self.width].view(np.int8).astype(np.float32) * scale
        return np.ascontiguousarray(raw).view(STORED_TYPES[self.dtype]).astype(self.decoded)


def tables_of(manifest: Mapping[str, Any]) -> dict[str, StoredTable]:
    """Returns the tables of a manifest by name."""
    if manifest.get("format") not in (1, FORMAT):
        raise StoreError(f"the store has format {manifest.get('format')}, and this reader reads 1 and {FORMAT}")
    with _damage_of("the manifest"):
        entries = enumerate(manifest["tables"])
        tables = [StoredTable(n, e["name"], e["width"], e["dtype"], tuple(e.get("default", ()))) for n, e in entries]
        for table in tables:
            if table.dtype not in STORED_TYPES or not 0 < table.width <= WIDEST:
                raise ValueError(f"the type or the width of table {table.name}")
            if np.array(table.default, float).shape not in ((0,), (table.width,)):
                raise ValueError(f"the default row of table {table.name}")
        return {table.name: table for table in tables}


@contextmanager
def _damage_of(what: str) -> Iterator[None]:
    """Raises StoreError for content of another form than an export has."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError, OSError) as error:
        raise StoreError(f"{what} is damaged: {type(error).__name__}: {error}") from error


def open_inside(folder: Path, name: str) -> BufferedReader:
    """Opens a regular file of an export. Raises StoreError for a name that leads out of the folder."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise StoreError(f"{folder / 'manifest.json'} names a file outside of its folder: {name}")
    try:
        descriptor = os.open(folder / name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # does not wait at a FIFO
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return os.fdopen(descriptor, "rb")
        os.close(descriptor)
    except (OSError, ValueError) as error:
        raise StoreError(f"{folder / name} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    raise StoreError(f"{folder / name} is not a regular file")


class FolderBackend:
    """Sorted shards in safetensors files, mapped into memory."""

    def __init__(self, place: str) -> None:
        self._path = Path(place)
        try:
            with open_inside(self._path, "manifest.json") as file:
                self._manifest = dict(json.load(file))
        except (StoreError, OSError, ValueError, TypeError, RecursionError) as error:
            raise StoreError(f"{place} is not an export of a ranking model: {error}") from error
        self._shards: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def current(self) -> int:
        return 0

    def manifest(self, version: int) -> dict[str, Any] | None:
        return dict(self._manifest)

    def file(self, version: int, name: str) -> bytes:
        with open_inside(self._path, name) as file:
            return file.read()

    def read(self, version: int, wanted: Mapping[StoredTable, np.ndarray]) -> tuple[int, str | None, _Read]:
        with _damage_of(str(self._path)):
            return 0, "0", {table.number: self._rows(table, ids) for table, ids in wanted.items()}

    def _rows(self, table: StoredTable, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        found, parts = np.zeros(len(ids), bool), [np.empty((0, table.row_bytes), np.uint8)]
        for shard in self._manifest["tables"][table.number]["shards"]:
            begin, end = np.searchsorted(ids, shard["first"]), np.searchsorted(ids, shard["last"], side="right")
            if begin == end:
                continue
            have, rows = self._shard(shard["file"], table.row_bytes)
            at = np.searchsorted(have, ids[begin:end]).clip(max=len(have) - 1)
            there = have[at] == ids[begin:end]
            found[begin:end] = there
            parts.append(rows[at[there]])
        return found, np.concatenate(parts)

    def _shard(self, name: str, row_bytes: int) -> tuple[np.ndarray, np.ndarray]:
        if name not in self._shards:
            with open_inside(self._path, name) as file:
                size, whole = int.from_bytes(file.read(8), "little"), os.fstat(file.fileno()).st_size
                if size > whole - 8:
                    raise StoreError(f"{self._path / name} is damaged: its header is longer than the file")
                header = json.loads(file.read(size))
                raw = np.memmap(file, np.uint8, "r", offset=8 + size)
            (a, b), (c, d) = header["ids"]["data_offsets"], header["rows"]["data_offsets"]
            if not (0 <= a < b <= len(raw) and 0 <= c <= d <= len(raw)):
                raise StoreError(f"{self._path / name} is damaged: its header has places outside of the file")
            self._shards[name] = raw[a:b].view(np.int64), raw[c:d].reshape((b - a) // 8, row_bytes)
        return self._shards[name]


class RedisBackend:
    """A server of Redis. ``redis://[:PASSWORD@]HOST[:PORT]/DB[?prefix=NAME]``, ``rediss://`` over TLS."""

    def __init__(self, place: str) -> None:
        import redis

        parts = urlsplit(place)
        query = dict(parse_qsl(parts.query))
        self.prefix = query.pop("prefix", "stoker")
        # A host may vanish without closing its connections.
        query = {"socket_timeout": "60", "socket_connect_timeout": "10", **query}
        self.client: Any = redis.Redis.from_url(urlunsplit(parts._replace(query=urlencode(query))))

    def key(self, *parts: object) -> str:
        return ":".join(map(str, (self.prefix, *parts)))

    def current(self) -> int:
        return int(self.client.get(self.key("current")) or 0)

    def manifest(self, version: int) -> dict[str, Any] | None:
        return json.loads(self.client.get(self.key(version, "manifest")) or "null")

    def file(self, version: int, name: str) -> bytes:
        return bytes(self.client.get(self.key(version, "file", name)) or b"")

    def read(self, version: int, wanted: Mapping[StoredTable, np.ndarray]) -> tuple[int, str | None, _Read]:
        pipeline = self.client.pipeline(transaction=True)
        pipeline.get(self.key("current")).get(self.key(version, "head"))
        asked = {table: ids for table, ids in wanted.items() if len(ids)}
        for table, ids in asked.items():
            raw = ids.astype("<i8").tobytes()
            pipeline.hmget(self.key(version, "rows", table.number), [raw[i : i + 8] for i in range(0, len(raw), 8)])
        current, head, *answers = pipeline.execute()
        read = {table.number: _joined(table, values) for table, values in zip(asked, answers, strict=True)}
        return int(current or 0), head.decode() if head else None, read


class LmdbBackend:
    """A folder of LMDB. ``lmdb://PATH``; a third slash begins an absolute path."""

    _open: dict[str, tuple[Any, bool]] = {}  # noqa: RUF012 -- a process opens a folder once: whether it may write
    opening = Lock()  # transactions that open databases must not overlap, nor an environment end while one reads

    def __init__(self, place: str, *, write: bool = False) -> None:
        import lmdb

        self._absent = lmdb.NotFoundError
        self._path = str(Path(place.removeprefix("lmdb://")).absolute())
        if not write and not (Path(self._path) / "data.mdb").exists():
            raise StoreError(f"there is no store at {place}")
        with self.opening:
            before, writes = self._open.get(self._path, (None, False))
            if before is None or (write and not writes):
                if before is not None:
                    before.close()
                sizes: dict[str, Any] = {"map_size": MAP_SIZE, "max_dbs": 1 << 10, "max_readers": 1 << 10}
                self._open[self._path] = lmdb.open(self._path, readonly=not write, lock=True, **sizes), write

    @property
    def environment(self) -> Any:
        return self._open[self._path][0]

    @contextmanager
    def _reading(self, *names: str) -> Iterator[Any]:
        """A transaction, and databases that close with it: without one `open_db` waits for writers, holding the GIL."""
        with self.opening, self.environment.begin() as transaction:
            yield transaction, *(self.environment.open_db(n.encode(), txn=transaction, create=False) for n in names)

    def current(self) -> int:
        return int(self._get("current") or 0)

    def manifest(self, version: int) -> dict[str, Any] | None:
        return json.loads(self._get(f"{version}:manifest") or "null")

    def file(self, version: int, name: str) -> bytes:
        return self._get(f"{version}:file:{name}") or b""

    def _get(self, key: str) -> Any:
        with suppress(self._absent), self._reading("meta") as (transaction, meta):
            return transaction.get(key.encode(), db=meta)

    def read(self, version: int, wanted: Mapping[StoredTable, np.ndarray]) -> tuple[int, str | None, _Read]:
        with suppress(self._absent), self._reading("meta", f"rows:{version}") as (transaction, meta, rows):
            current, head = (transaction.get(k.encode(), db=meta) for k in ("current", f"{version}:head"))
            with transaction.cursor(rows) as cursor:
                read = {table.number: self._rows(cursor, table, ids) for table, ids in wanted.items()} if head else {}
            return int(current or 0), head.decode() if head else None, read
        return self.current(), None, {}

    def _rows(self, cursor: Any, table: StoredTable, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        keys = lmdb_keys(table.number, ids)
        pairs = cursor.getmulti(keys)
        have = np.frombuffer(b"".join(key for key, _ in pairs), np.uint8).reshape(-1, 10)
        there = (np.ascontiguousarray(have[:, 2:]).view(">u8")[:, 0].astype(np.uint64) ^ _SIGN).view(np.int64)
        raw = np.frombuffer(b"".join(row for _, row in pairs), np.uint8).reshape(-1, table.row_bytes)
        return np.isin(ids, there, assume_unique=True), raw


def lmdb_keys(table: int, ids: np.ndarray) -> list[bytes]:
    """Returns the keys of ids."""
    keys = np.empty((len(ids), 10), np.uint8)
    keys[:, :2] = np.frombuffer(table.to_bytes(2, "big"), np.uint8)
    keys[:, 2:] = (ids.view(np.uint64) ^ _SIGN).astype(">u8").view(np.uint8).reshape(-1, 8)
    raw = keys.tobytes()
    return [raw[i : i + 10] for i in range(0, len(raw), 10)]


def _joined(table: StoredTable, values: list[bytes | None]) -> tuple[np.ndarray, np.ndarray]:
    found = np.fromiter((value is not None for value in values), bool, len(values))
    raw = np.frombuffer(b"".join(value for value in values if value is not None), np.uint8)
    return found, raw.reshape(-1, table.row_bytes)


def backend_of(place: str) -> FolderBackend | RedisBackend | LmdbBackend:
    """Returns the backend of a folder or a URL."""
    scheme = place.partition("://")[0] if "://" in place else ""
    if scheme in ("redis", "rediss", "unix"):
        return RedisBackend(place)
    return LmdbBackend(place) if scheme == "lmdb" else FolderBackend(place)
