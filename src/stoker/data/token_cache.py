"""Tokens on disk: memory-mapped, keyed by content, written shard by shard, never built twice.

A cache is a folder named by the digest of everything its content depends on: the bytes of the source, the tokenizer,
the template and the settings. A shard becomes visible when its ``.json`` is renamed into place, so a killed build
leaves only whole shards, and the next build continues after them.
"""

from __future__ import annotations

import hashlib
import json
import resource
import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from stoker.data.files.row_batch import INDEX
from stoker.data.files.rows import Rejected
from stoker.data.text_codec import TextCodec
from stoker.data.token_shards import BELOW
from stoker.data.tokenise import RowSettings

FORMAT = 7  # raised whenever the tokens of an unchanged source would change
MAPS = 3  # memory maps of a shard: its index, tokens and trained bits
MAPPED_SHARDS = 128  # of a process, the last used ones: three descriptors each, half of the usual limit of 1,024


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
