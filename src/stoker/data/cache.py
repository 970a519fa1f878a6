"""Tokens on disk: memory-mapped, keyed by content, written shard by shard, never built twice.

A cache is a folder named by the digest of everything that decides its content: the bytes of the source, the
tokenizer, the template and the settings. A shard becomes visible when its ``.json`` is renamed into place, so a
killed build leaves whole shards only, and the next build goes on behind them.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from stoker.data.record import Rejected
from stoker.data.tokenise import Batch, RowSettings, TextCodec, Tokenised

FORMAT = 1  # raised whenever the tokens of an unchanged source would change
SHARD_TOKENS = 1 << 22  # about 8 MiB of 16-bit tokens: a stream can start after one of them
SHARD_ROWS = 8192
DROPPED_LISTED = 10_000  # per shard; all of them are counted

INDEX = np.dtype(
    [
        ("start", "<i8"),  # first token, counted within the shard
        ("length", "<i4"),
        ("trained", "<i4"),  # tokens with a loss: the first token of a row never has one
        ("row", "<i8"),
        ("file", "<i4"),
        ("digest", "<u8"),
        ("stops", "?"),
        ("cut", "?"),
        ("exact", "?"),
    ]
)


def cache_key(fingerprint: str, codec: TextCodec, settings: RowSettings) -> str:
    """The digest that names a cache."""
    content = json.dumps([FORMAT, fingerprint, codec.fingerprint, asdict(settings)], sort_keys=True)
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Row:
    """One training sequence as it lies in a cache: views of the memory map."""

    ids: np.ndarray
    trained: np.ndarray


@dataclass(frozen=True)
class ShardSummary:
    """What building a shard counted."""

    rows_in: int
    rows_cut: int
    rows_split: int
    sequences: int
    tokens: int
    trained: int
    dropped: tuple[Rejected, ...]
    reasons: dict[str, int]
    files: tuple[str, ...]


class ShardWriter:
    """Collects rows and writes them as the shards of a cache."""

    def __init__(self, folder: Path, vocabulary: int, first: int) -> None:
        self.folder = folder
        self.dtype = np.dtype(np.uint16 if vocabulary <= 1 << 16 else np.uint32)
        self.number = first
        self._reset()

    def _reset(self) -> None:
        self.rows: list[Tokenised] = []
        self.tokens = 0
        self.batch = Batch()

    def add(self, batch: Batch) -> None:
        """Takes a chunk of rows; writes a shard when enough of them have come together."""
        self.rows.extend(batch.rows)
        self.tokens += sum(len(row.ids) for row in batch.rows)
        self.batch.rows_in += batch.rows_in
        self.batch.rows_cut += batch.rows_cut
        self.batch.rows_split += batch.rows_split
        self.batch.dropped.extend(batch.dropped)
        if self.tokens >= SHARD_TOKENS or len(self.rows) >= SHARD_ROWS:
            self.flush()

    def flush(self) -> None:
        """Writes what has come together, if anything."""
        if not self.batch.rows_in:
            return
        name = f"shard-{self.number:05d}"
        files = sorted({row.source for row in self.rows})
        number_of = {file: i for i, file in enumerate(files)}
        index = np.zeros(len(self.rows), dtype=INDEX)
        lengths = np.array([len(row.ids) for row in self.rows], dtype=np.int64)
        index["length"] = lengths
        index["start"] = np.cumsum(lengths) - lengths
        for i, row in enumerate(self.rows):
            index[i]["trained"] = int(row.trained[1:].sum())
            index[i]["row"], index[i]["file"] = row.row, number_of[row.source]
            index[i]["digest"] = row.digest
            index[i]["stops"], index[i]["cut"], index[i]["exact"] = row.stops, row.cut, row.exact_prefix
        ids = np.concatenate([row.ids for row in self.rows]) if self.rows else np.zeros(0, np.uint32)
        trained = np.concatenate([row.trained for row in self.rows]) if self.rows else np.zeros(0, bool)
        ids.astype(self.dtype).tofile(self.folder / f"{name}.tokens")
        np.packbits(trained).tofile(self.folder / f"{name}.trained")
        np.save(self.folder / f"{name}.index.npy", index)
        summary = {
            "rows_in": self.batch.rows_in,
            "rows_cut": self.batch.rows_cut,
            "rows_split": self.batch.rows_split,
            "sequences": len(self.rows),
            "tokens": int(lengths.sum()),
            "trained": int(index["trained"].sum()),
            "dtype": self.dtype.name,
            "files": files,
            "dropped": [[d.source, d.row, d.reason] for d in self.batch.dropped[:DROPPED_LISTED]],
            "reasons": dict(Counter(d.reason.split(":")[0] for d in self.batch.dropped)),
        }
        write_json(self.folder / f"{name}.json", summary)
        self.number += 1
        self._reset()


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file so that it is either whole or not there."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(value, ensure_ascii=False))
    temporary.replace(path)


class TokenCache:
    """The rows of one source as tokens; whole, or still growing behind a running build.

    Rows are numbered over all shards. Views come from memory maps: a corpus need not fit into memory.
    """

    def __init__(
        self,
        folder: Path,
        failed: Callable[[], BaseException | None] = lambda: None,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self.folder = folder
        self._failed = failed
        self.close = close  # ends a build that runs behind; its whole shards stay
        self._indices: list[np.ndarray] = []
        self._tokens: list[np.memmap | np.ndarray] = []
        self._trained: list[np.memmap | np.ndarray] = []
        self.summaries: list[ShardSummary] = []
        self.starts = [0]
        self.refresh()

    def refresh(self) -> None:
        """Opens the shards that have come since the last look."""
        while (meta := self.folder / f"shard-{len(self.summaries):05d}.json").exists():
            summary = json.loads(meta.read_text())
            stem = meta.with_suffix("")
            empty = summary["sequences"] == 0
            self._indices.append(np.load(f"{stem}.index.npy", mmap_mode=None if empty else "r"))
            dtype = np.dtype(summary.pop("dtype"))
            self._tokens.append(np.zeros(0, dtype) if empty else np.memmap(f"{stem}.tokens", dtype, "r"))
            self._trained.append(np.zeros(0, np.uint8) if empty else np.memmap(f"{stem}.trained", np.uint8, "r"))
            summary["dropped"] = tuple(Rejected(*d) for d in summary["dropped"])
            summary["files"] = tuple(summary["files"])
            self.summaries.append(ShardSummary(**summary))
            self.starts.append(self.starts[-1] + summary["sequences"])

    @property
    def complete(self) -> bool:
        """Whether the whole source has been tokenised."""
        return (self.folder / "complete.json").exists()

    @property
    def ready(self) -> int:
        """Rows that can be read now."""
        return self.starts[-1]

    @property
    def rows(self) -> int:
        """Rows of the whole source; waits for a running build."""
        while not self.complete:
            self._wait()
        self.refresh()
        return self.ready

    def _wait(self) -> None:
        if (error := self._failed()) is not None:
            raise error
        time.sleep(0.05)
        self.refresh()

    def wait_for(self, row: int) -> bool:
        """Waits until a row can be read; false when the source ends before it."""
        while self.ready <= row:
            if self.complete:
                self.refresh()
                return self.ready > row
            self._wait()
        return True

    def _place(self, row: int) -> tuple[int, int]:
        if not 0 <= row < self.ready:
            raise IndexError(f"row {row} of {self.ready}")
        shard = int(np.searchsorted(self.starts, row, side="right")) - 1
        return shard, row - self.starts[shard]

    def __getitem__(self, row: int) -> Row:
        shard, i = self._place(row)
        start, length = int(self._indices[shard]["start"][i]), int(self._indices[shard]["length"][i])
        first_byte = start // 8
        bits = np.unpackbits(self._trained[shard][first_byte : (start + length + 7) // 8])
        trained = bits[start - first_byte * 8 :][:length].astype(bool)
        return Row(np.asarray(self._tokens[shard][start : start + length]), trained)

    def length(self, row: int) -> int:
        """Tokens of a row."""
        shard, i = self._place(row)
        return int(self._indices[shard]["length"][i])

    def origin(self, row: int) -> tuple[str, int]:
        """(file, row number) where a row came from."""
        shard, i = self._place(row)
        entry = self._indices[shard][i]
        return self.summaries[shard].files[int(entry["file"])], int(entry["row"])

    def column(self, name: str) -> np.ndarray:
        """One column of the index over all rows ready now: ``length``, ``trained``, ``digest``, ``stops`` ..."""
        if not self._indices:
            return np.zeros(0, dtype=INDEX[name])
        return np.concatenate([index[name] for index in self._indices])


def lock(folder: Path) -> FileLock:
    """The lock under which a cache is built: a second process waits and then finds it whole."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(f"{folder}.lock")
