"""Writing of the shards of a token cache."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import numpy as np

from stoker.data.dropped_rows import reason_kind
from stoker.data.files.byte_streams import DAMAGED
from stoker.data.files.row_batch import EncodedBatch
from stoker.files import write_json

SHARD_TOKENS = 1 << 22  # about 8 MiB of 16-bit tokens: a stream can start after one of them
SHARD_ROWS = 8192
DROPPED_LISTED = 10_000  # per shard; all of them are counted
BELOW = "./"  # begins the name of a file that is stored relative to its source's root
KINDS = 50  # reasons counted separately in a shard


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
        file.write(np.ascontiguousarray(values).view(np.uint8).data)  # `tofile` gives no error code if the disk is full
        file.flush()
        os.fsync(file.fileno())
