"""Tokens on disk: memory-mapped, keyed by content, written shard by shard, never built twice.

A cache is a folder named by the digest of everything its content depends on: the bytes of the source, the tokenizer,
the template and the settings. A shard becomes visible when its ``.json`` is renamed into place, so a killed build
leaves only whole shards, and the next build continues after them.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from stoker.data.files.byte_streams import DAMAGED
from stoker.data.files.row_batch import INDEX, EncodedBatch
from stoker.data.files.rows import Rejected
from stoker.data.templates.render_row import TEMPLATE_REFUSES
from stoker.data.tokenise import RowSettings, TextCodec
from stoker.files import replace_file

FORMAT = 7  # raised whenever the tokens of an unchanged source would change
SHARD_TOKENS = 1 << 22  # about 8 MiB of 16-bit tokens: a stream can start after one of them
SHARD_ROWS = 8192
DROPPED_LISTED = 10_000  # per shard; all of them are counted
MAPS = 3  # memory maps of a shard: its index, tokens and trained bits
MAPPED_SHARDS = 128  # of a process, the last used ones: three descriptors each, half of the usual limit of 1,024
BELOW = "./"  # begins the name of a file that is stored relative to its source's root
KINDS, LONGEST_KIND = 50, 160  # reasons counted separately in a shard, and characters of one


def cache_key(fingerprint: str, codec: TextCodec, settings: RowSettings) -> str:
    """Returns the digest that names a cache."""
    parts = [FORMAT, repr(INDEX.descr), fingerprint, codec.fingerprint, asdict(settings)]
    content = json.dumps(parts, sort_keys=True)
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Row:
    """One training sequence of a cache, as views of the memory map.

    Attributes:
        good: False if a label marks the answer as bad.
        margin: how much better the chosen answer of a pair is, on the row's own scale.
    """

    ids: np.ndarray
    trained: np.ndarray
    good: bool = True
    margin: float = 0.0

    @property
    def prompt(self) -> np.ndarray:
        """The ids before the first trained token: what the model answers, in tasks that sample its answers."""
        return self.ids[: int(self.trained.argmax())]


@dataclass(frozen=True)
class ShardSummary:
    """The counts of a shard."""

    rows_in: int
    rows_cut: int
    rows_split: int
    sequences: int
    tokens: int
    trained: int
    dropped: tuple[Rejected, ...]
    reasons: dict[str, int]
    files: tuple[str, ...]
    ignored: dict[str, int]
    turns_untrained: int
    longest: int
    special_tokens: int


class ShardWriter:
    """Collects rows and writes them as the shards of a cache."""

    def __init__(self, folder: Path, vocabulary: int, first: int, root: Path | str = "") -> None:
        """
        Args:
            root: of the source. Names are stored relative to it, since a copy of the source has the same cache.
        """
        self.folder = folder
        self._above = f"{root}/"
        self.dtype = np.dtype(np.uint16 if vocabulary <= 1 << 16 else np.uint32)
        self.number = first
        self._reset()

    def _reset(self) -> None:
        self.batches: list[EncodedBatch] = []
        self.tokens = 0
        self.sequences = 0
        self.dropped = 0

    def add(self, batch: EncodedBatch) -> None:
        """Takes a chunk of rows; writes a shard once there are enough."""
        self.batches.append(batch)
        self.tokens += len(batch.ids)
        self.sequences += len(batch.index)
        self.dropped += len(batch.dropped)
        if self.tokens >= SHARD_TOKENS or self.sequences >= SHARD_ROWS or self.dropped >= SHARD_ROWS:
            self.flush()

    def flush(self) -> None:
        """Writes the collected batches, if there are any."""
        if not self.batches:
            return
        name = f"shard-{self.number:05d}"
        files = sorted({file for batch in self.batches for file in batch.files})
        number_of = {file: i for i, file in enumerate(files)}
        index = np.concatenate([_renumbered(batch, number_of) for batch in self.batches])
        lengths = index["length"].astype(np.int64)
        index["start"] = np.cumsum(lengths) - lengths
        ids = np.concatenate([batch.ids for batch in self.batches])
        trained = np.concatenate([batch.trained for batch in self.batches])
        _write(self.folder / f"{name}.tokens", ids.astype(self.dtype))
        _write(self.folder / f"{name}.trained", np.packbits(trained))
        _write(self.folder / f"{name}.index", index)
        dropped = [d for batch in self.batches for d in batch.dropped]
        summary = {
            "rows_in": sum(batch.rows_in for batch in self.batches),
            "rows_cut": sum(batch.rows_cut for batch in self.batches),
            "rows_split": sum(batch.rows_split for batch in self.batches),
            "sequences": len(index),
            "tokens": len(ids),
            "trained": int(index["trained"].sum()),
            "dtype": self.dtype.name,
            "files": [self._relative(file) for file in files],
            "dropped": [[self._relative(d.source), d.row, d.reason] for d in dropped[:DROPPED_LISTED]],
            "reasons": _bounded(Counter(reason_kind(d.reason) for d in dropped)),
            "ignored": dict(sum((batch.ignored for batch in self.batches), Counter())),
            "turns_untrained": sum(batch.turns_untrained for batch in self.batches),
            "longest": max(batch.longest for batch in self.batches),
            "special_tokens": sum(batch.special_tokens for batch in self.batches),
        }
        write_json(self.folder / f"{name}.json", summary)
        self.number += 1
        self._reset()

    def _relative(self, file: str) -> str:
        return BELOW + file.removeprefix(self._above) if file.startswith(self._above) else file


def reason_kind(reason: str) -> str:
    """Returns the stable phrase of a reason, by which reasons are counted. A template's message belongs to it."""
    phrase, _, detail = reason.partition(":")
    return reason[:LONGEST_KIND] if phrase == TEMPLATE_REFUSES and detail else phrase


def _bounded(kinds: Counter[str]) -> dict[str, int]:
    """Returns the most frequent reasons; a template may give a different one for every row.

    Damaged files are among them, as one of their rows stands for all that are lost.
    """
    damage = {kind: count for kind, count in kinds.items() if kind.startswith(DAMAGED)}
    most = dict(kinds.most_common(KINDS)) | damage
    rest = kinds.total() - sum(most.values())
    return most | ({"other reasons": rest} if rest else {})


def _renumbered(batch: EncodedBatch, number_of: dict[str, int]) -> np.ndarray:
    """Returns the batch's index with the shard's numbers of the files."""
    index = batch.index.copy()
    if len(index):
        index["file"] = np.array([number_of[file] for file in batch.files], dtype=np.int32)[index["file"]]
    return index


def _write(path: Path, values: np.ndarray) -> None:
    """Writes an array's bytes and syncs them to disk, before any other file refers to them."""
    with path.open("wb") as file:
        values.tofile(file)
        file.flush()
        os.fsync(file.fileno())


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file whole or not at all."""
    replace_file(path, json.dumps(value, ensure_ascii=False))


@dataclass(frozen=True)
class _Shard:
    """The arrays of a shard, mapped from its files."""

    index: np.ndarray
    tokens: np.ndarray
    trained: np.ndarray


def _most_mapped() -> int:
    """Returns the number of shards that a process maps at once: a map of Python's keeps a descriptor."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return MAPPED_SHARDS
    return max(1, min(MAPPED_SHARDS, descriptors // 2 // MAPS))


@lru_cache(maxsize=_most_mapped())
def _mapped(owner: object, stem: str, tokens: np.dtype[Any]) -> _Shard:
    """Maps a shard.

    Args:
        owner: an object of the cache's own: a cache that was built again at the same path has other maps.
        stem: path of its files, without their suffixes.
        tokens: type of the tokens.
    """
    kinds: dict[str, np.dtype[Any]] = {"index": INDEX, "tokens": tokens, "trained": np.dtype(np.uint8)}
    return _Shard(*(np.memmap(f"{stem}.{suffix}", kind, "r") for suffix, kind in kinds.items()))


class TokenCache:
    """The rows of one source as tokens; complete, or still growing during a build.

    Rows are numbered over all shards. Views come from memory maps: a corpus need not fit into memory.
    """

    def __init__(
        self,
        folder: Path,
        failed: Callable[[], BaseException | None] = lambda: None,
        close: Callable[[], None] = lambda: None,
        root: Path | str = "",
    ) -> None:
        self.folder = folder
        self._root = root
        self._failed = failed
        self.close = close  # ends a background build; its whole shards stay
        self._dtypes: list[np.dtype[Any]] = []
        self._owner = object()
        self.summaries: list[ShardSummary] = []
        self.starts = [0]
        self.refresh()

    def refresh(self) -> None:
        """Opens the shards written since the last call."""
        while (meta := self.folder / f"shard-{len(self.summaries):05d}.json").exists():
            summary = json.loads(meta.read_text(encoding="utf-8"))
            self._dtypes.append(np.dtype(summary.pop("dtype")))
            summary["dropped"] = tuple(Rejected(self._named(file), *d) for file, *d in summary["dropped"])
            summary["files"] = tuple(map(self._named, summary["files"]))
            self.summaries.append(ShardSummary(**summary))
            self.starts.append(self.starts[-1] + summary["sequences"])

    def _named(self, file: str) -> str:
        return f"{self._root}/{file.removeprefix(BELOW)}" if file.startswith(BELOW) else file

    def _shard(self, shard: int) -> _Shard:
        if not self.summaries[shard].sequences:  # an empty file cannot be mapped
            return _Shard(np.zeros(0, INDEX), np.zeros(0, self._dtypes[shard]), np.zeros(0, np.uint8))
        return _mapped(self._owner, str(self.folder / f"shard-{shard:05d}"), self._dtypes[shard])

    @property
    def complete(self) -> bool:
        """Returns whether the whole source has been tokenised."""
        return (self.folder / "complete.json").exists()

    @property
    def ready(self) -> int:
        """Number of rows that can be read now."""
        return self.starts[-1]

    @property
    def rows(self) -> int:
        """Number of rows of the whole source; waits for a running build."""
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
        shard = bisect_right(self.starts, row) - 1
        return shard, row - self.starts[shard]

    def __getitem__(self, row: int) -> Row:
        shard, i = self._place(row)
        arrays = self._shard(shard)
        entry = arrays.index[i]
        start, length = int(entry["start"]), int(entry["length"])
        first_byte = start // 8
        bits = np.unpackbits(arrays.trained[first_byte : (start + length + 7) // 8])
        trained = bits[start - first_byte * 8 :][:length].astype(bool)
        ids = np.asarray(arrays.tokens[start : start + length])
        return Row(ids, trained, bool(entry["good"]), float(entry["margin"]))

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        """Returns the number of tokens of each of these rows."""
        shards = np.searchsorted(self.starts, rows, side="right") - 1
        lengths = np.empty(len(rows), dtype=np.int64)
        for shard in np.unique(shards).tolist():
            here = shards == shard
            lengths[here] = self._shard(shard).index["length"][rows[here] - self.starts[shard]]
        return lengths

    def origin(self, row: int) -> tuple[str, int]:
        """Returns the origin of a row as (file, row number)."""
        shard, i = self._place(row)
        entry = self._shard(shard).index[i]
        return self.summaries[shard].files[int(entry["file"])], int(entry["row"])

    def ending(self, row: int) -> tuple[int, bool]:
        """Returns (tokens truncated after a row, whether its source row continues in the next one)."""
        shard, i = self._place(row)
        entry = self._shard(shard).index[i]
        return int(entry["lost"]), bool(entry["continues"])

    def largest_id(self) -> int:
        """Returns the largest token id of all rows ready now; reads them all."""
        shards = (self._shard(shard).tokens for shard in range(len(self.summaries)))
        return max((int(tokens.max()) for tokens in shards if len(tokens)), default=0)

    def column(self, name: str) -> np.ndarray:
        """Returns one column of the index over all rows ready now: ``length``, ``trained``, ``digest`` ..."""
        values = np.empty(self.ready, dtype=INDEX[name])
        for shard, (first, last) in enumerate(pairwise(self.starts)):
            values[first:last] = self._shard(shard).index[name]
        return values
