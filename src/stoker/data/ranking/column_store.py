"""A click log as columns on disk: each row is written once, and memory-mapped by every process."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from stoker.data.files.cache_lock import lock
from stoker.data.ranking.column_files import ColumnFiles, LogPart, build_version, read_version
from stoker.data.ranking.encode_columns import ColumnEncoder
from stoker.data.ranking.features import NUMBERS, Features
from stoker.data.ranking.log_rows import file_rows, log_rows, ordered_files
from stoker.data.sources import Source
from stoker.data.splits import ALL_ROWS
from stoker.errors import Problem, RunFailed
from stoker.hardware.cache_folder import cache_folder

VERSION = 11  # raised whenever the layout of the files or an id changes
_TYPES = {
    "labels": np.float32,
    "time": np.float64,
    "weight": np.float32,
    "group": np.int64,
    "grouped": np.bool_,
    "place": np.int64,
    "slice": np.int32,
    "lengths": np.int32,
    "weights": np.float32,
}


class ColumnStore:
    """The columns of a log, mapped into memory; names as `ColumnEncoder` has them."""

    def __init__(self, files: ColumnFiles, features: Features) -> None:
        self._files, self.features, self.summary = files, features, files.summary
        self._offsets: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return self.summary.rows

    def array(self, name: str) -> np.ndarray:
        """Returns a column, read-only."""
        wide = {"labels": len(self.features.labels), "place": 2}.get(name)
        kind, size = np.dtype(self._type(name)), self._files.sizes[name]
        found = np.memmap(self._files.path(name), kind, "r", shape=size // kind.itemsize) if size else np.empty(0, kind)
        return found.reshape(-1, wide) if wide else found

    def spans(self, number: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the offset and the number of each row's ids in their column; int64."""
        single = self.features.columns[number].kind == "id"
        if single and len(self.array(f"column{number}")) == len(self):  # one each
            return rows, np.ones(len(rows), dtype=np.int64)
        if number not in self._offsets:
            lengths = self.array(f"lengths{number}")
            self._offsets[number] = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        offsets = self._offsets[number]
        return offsets[rows], offsets[rows + 1] - offsets[rows]

    def _type(self, name: str) -> Any:
        stem = name.rstrip("0123456789")
        if stem == "column":
            column = self.features.columns[int(name.removeprefix(stem))]
            return np.float32 if column.kind in NUMBERS else np.int64
        return _TYPES[stem]


def open_store(sources: Sequence[tuple[Source, str]], features: Features, ignored: Sequence[str]) -> ColumnStore:
    """Returns the columns of sources; builds those that are not in the cache.

    Args:
        sources: each with the format that its block states.
        ignored: columns that are left out on purpose.

    Raises:
        RunFailed: the cache cannot be written.
    """
    plan = json.dumps(
        [VERSION, features.unfitted.as_json(), sorted(ignored), [form for _, form in sources]], sort_keys=True
    )
    parts = [part for source, form in sources for part in _parts_of(source, form)]
    digest, names = hashlib.blake2b(plan.encode(), digest_size=16), []
    for part in parts:
        digest.update(part.digest.encode())
        names.append(digest.hexdigest())
    place = cache_folder() / "ranking"
    try:
        found = read_version(place / names[-1])
        if found is None:
            with lock(place / names[-1]):
                found = read_version(place / names[-1])
                found = found or build_version(names, parts, place, ColumnEncoder(features, ignored))
    except OSError as error:
        advice = "free some space, or set STOKER_CACHE to another folder"
        problem = Problem(
            f"the cache of columns cannot be written: {error.strerror or error}", advice, file=str(place / names[-1])
        )
        raise RunFailed(problem) from error
    return ColumnStore(found, features)


def _parts_of(source: Source, form: str) -> list[LogPart]:
    """Splits a source into files, so that appended files extend a log; a slice of a source is one part."""
    if source.corpus or source.part != ALL_ROWS:
        return [LogPart(f"{source.fingerprint()};", lambda: log_rows(source, form))]
    return [
        LogPart(f"{name}\0{content};", partial(file_rows, path, form)) for path, name, content in ordered_files(source)
    ]
