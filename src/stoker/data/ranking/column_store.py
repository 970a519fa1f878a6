"""A click log as columns on the disk: written once, then mapped into memory by every process."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from stoker.data.ranking.encode_columns import ColumnEncoder
from stoker.data.ranking.features import NUMBERS, Features
from stoker.data.ranking.log_rows import log_rows
from stoker.data.rows import Raw, Rejected
from stoker.data.sources import Source
from stoker.data.token_cache import lock, reason_kind, write_json
from stoker.errors import Problem, RunFailed
from stoker.hardware.cache_folder import cache_folder

VERSION = 4  # of the files' layout
BATCH = 4096  # rows encoded at a time
PLACES = 100  # rejected rows of a kind that are named
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


@dataclass(frozen=True)
class StoreSummary:
    """What was read.

    Attributes:
        rows_in: rows of the sources.
        reasons: why rows were left out, by kind, and how many.
        rejected: the first of each kind.
        unknown: fields that are no feature, as no row had them among those that the features were found from.
    """

    rows_in: int
    rows: int
    files: tuple[str, ...]
    slices: tuple[tuple[str, ...], ...]
    reasons: dict[str, int] = field(default_factory=dict)
    rejected: tuple[Rejected, ...] = ()
    unknown: dict[str, int] = field(default_factory=dict)


class ColumnStore:
    """The columns of a log, mapped into memory; names as `ColumnEncoder` has them."""

    def __init__(self, folder: Path, features: Features) -> None:
        self.folder, self.features = folder, features
        values = json.loads((folder / "complete.json").read_text(encoding="utf-8"))
        rejected = tuple(Rejected(*entry) for entry in values.pop("rejected"))
        files, slices = tuple(values.pop("files")), tuple(tuple(names) for names in values.pop("slices"))
        self.summary = StoreSummary(**values, files=files, slices=slices, rejected=rejected)
        self._offsets: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return self.summary.rows

    def array(self, name: str) -> np.ndarray:
        """A column, read-only."""
        path = self.folder / f"{name}.bin"
        wide = {"labels": len(self.features.labels), "place": 2}.get(name)
        kind = self._type(name)
        found = np.memmap(path, kind, "r") if path.stat().st_size else np.empty(0, kind)
        return found.reshape(-1, wide) if wide else found

    def spans(self, number: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where the ids of rows begin within their column, and how many there are; int64."""
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
    """The columns of sources, built first where they are not in the cache.

    Args:
        sources: each with the format that its block states.
        ignored: columns that are left out on purpose.

    Raises:
        RunFailed: the cache cannot be written.
    """
    plan = json.dumps(
        [VERSION, features.unfitted.as_json(), sorted(ignored), [form for _, form in sources]], sort_keys=True
    )
    digest = hashlib.blake2b(plan.encode(), digest_size=16)
    for source, _ in sources:
        digest.update(source.fingerprint().encode())
    folder = cache_folder() / "ranking" / digest.hexdigest()
    try:
        if not (folder / "complete.json").exists():
            with lock(folder):
                if not (folder / "complete.json").exists():
                    _build(folder, sources, ColumnEncoder(features, ignored))
    except OSError as error:
        advice = "free some space, or set STOKER_CACHE to another folder"
        problem = Problem(
            f"the cache of columns cannot be written: {error.strerror or error}", advice, file=str(folder)
        )
        raise RunFailed(problem) from error
    return ColumnStore(folder, features)


def _build(folder: Path, sources: Sequence[tuple[Source, str]], encoder: ColumnEncoder) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows_in = rows = 0
    reasons: dict[str, int] = {}
    unknown: dict[str, int] = {}
    rejected: list[Rejected] = []
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for batch in _batches(sources):
            encoded = encoder.encode(batch)
            rows_in, rows = rows_in + len(batch), rows + encoded.rows
            for name, array in encoded.arrays.items():
                if name not in files:
                    files[name] = stack.enter_context((folder / f"{name}.bin").open("wb"))
                files[name].write(np.ascontiguousarray(array).data)
            for name, count in encoded.unknown.items():
                unknown[name] = unknown.get(name, 0) + count
            for row in encoded.rejected:
                kind = reason_kind(row.reason)
                reasons[kind] = reasons.get(kind, 0) + 1
                if reasons[kind] <= PLACES:
                    rejected.append(row)
        if not rows_in:
            for name, array in encoder.encode([]).arrays.items():
                (folder / f"{name}.bin").write_bytes(array.tobytes())
    values = {
        "rows_in": rows_in,
        "rows": rows,
        "files": list(encoder.files),
        "slices": [list(codes) for codes in encoder.slices],
        "reasons": dict(sorted(reasons.items(), key=lambda item: -item[1])),
        "rejected": [[row.source, row.row, row.reason] for row in rejected],
        "unknown": unknown,
    }
    write_json(folder / "complete.json", values)


def _batches(sources: Sequence[tuple[Source, str]]) -> Iterator[list[Raw | Rejected]]:
    rows = (row for source, form in sources for row in log_rows(source, form))
    while batch := list(islice(rows, BATCH)):
        yield batch
