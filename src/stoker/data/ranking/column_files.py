"""Append-only columns on disk: a log's version is a length of each column, and a longer log appends to them.

A version is a folder named by the digest of everything it depends on, with ``complete.json``: a summary of the log, the
folder of the columns' files, and the length in bytes of each. A log with more files at its end appends to the files of
the version before. Processes that have mapped the files keep seeing the old length; bytes that a killed process left
behind are truncated before the next append.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np

from stoker.data.dropped_rows import reason_kind
from stoker.data.files.cache_lock import lock
from stoker.data.files.rows import Raw, Rejected
from stoker.data.ranking.cell_forms import FORMS, CellForms, count_forms
from stoker.data.ranking.encode_columns import ColumnEncoder
from stoker.data.ranking.features import Features
from stoker.files import write_json

BATCH = 4096  # rows encoded at a time
PLACES = 100  # rejected rows of a reason that are named
COMPLETE, TIP = "complete.json", "tip.json"


@dataclass(frozen=True)
class LogPart:
    """A part of a log, such as a file, whose rows are as they were as long as its digest is.

    Attributes:
        digest: of its content and its name.
        rows: reads it.
    """

    digest: str
    rows: Callable[[], Iterator[Raw | Rejected]]


@dataclass
class FileSummary:
    """A summary of the rows of one file.

    Attributes:
        rows_in: its rows.
        reasons: number of rows left out, by reason.
        columns: the features, the labels and the group that a row has a field of, in the order of their names.
        forms: counts of the cells of each feature with ids.
    """

    rows_in: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    columns: list[str] = field(default_factory=list)
    forms: dict[str, CellForms] = field(default_factory=dict)

    @property
    def dropped(self) -> int:
        """Returns the number of rows left out."""
        return sum(self.reasons.values())


def in_words(reasons: Mapping[str, int]) -> str:
    """Returns reasons of dropped rows as text, the most frequent first."""
    return ", ".join(f"{reason} ({count:,})" for reason, count in sorted(reasons.items(), key=lambda item: -item[1]))


@dataclass
class LogSummary:
    """A summary of the rows that were read.

    Attributes:
        rows_in: rows of the sources.
        files: names of the files that have rows, in order.
        parts: summary of each file, by name, in order.
        slices: for each column of slices, its values in the order of their codes.
        reasons: number of rows left out, by reason.
        rejected: the first rows of each reason, at most `PLACES`.
        unknown: fields that are not features, since no row had them when the features were detected.
    """

    rows_in: int = 0
    rows: int = 0
    files: tuple[str, ...] = ()
    parts: dict[str, FileSummary] = field(default_factory=dict)
    slices: tuple[tuple[str, ...], ...] = ()
    reasons: dict[str, int] = field(default_factory=dict)
    rejected: list[Rejected] = field(default_factory=list)
    unknown: dict[str, int] = field(default_factory=dict)

    def count(
        self, rows: Sequence[Raw | Rejected], rejected: Sequence[Rejected], unknown: Mapping[str, int], of: Features
    ) -> None:
        """Adds a batch: all of its rows, those that were rejected, its unknown fields, and those of the features."""
        counted, known = [column.name for column in of if column.kind in FORMS], of.read
        for source, of_file in groupby(rows, key=lambda row: row.source):
            part = self.parts.setdefault(source, FileSummary(forms={name: CellForms() for name in counted}))
            there = set(part.columns)
            for row in of_file:
                part.rows_in += 1
                if isinstance(row, Raw) and isinstance(row.value, dict):
                    there.update(row.value.keys() & known)
                    count_forms(part.forms, row.value)
            part.columns = sorted(there)
        for name, count in unknown.items():
            self.unknown[name] = self.unknown.get(name, 0) + count
        for row in rejected:
            kind = reason_kind(row.reason)
            reasons = self.parts[row.source].reasons
            reasons[kind] = reasons.get(kind, 0) + 1
            self.reasons[kind] = self.reasons.get(kind, 0) + 1
            if self.reasons[kind] <= PLACES:
                self.rejected.append(row)


@dataclass(frozen=True)
class ColumnFiles:
    """A version of a log's columns.

    Attributes:
        folder: of their files.
        sizes: bytes of each column that are the version's.
    """

    folder: Path
    sizes: dict[str, int]
    summary: LogSummary

    def path(self, name: str) -> Path:
        """Returns the file of a column."""
        return self.folder / f"{name}.bin"


def read_version(folder: Path) -> ColumnFiles | None:
    """Reads the version of a folder; returns None if it is incomplete, or its columns are missing."""
    try:
        values = json.loads((folder / COMPLETE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    at, sizes = folder.parent / values.pop("columns"), values.pop("sizes")
    rejected = [Rejected(*entry) for entry in values.pop("rejected")]
    files, slices = tuple(values.pop("files")), tuple(tuple(names) for names in values.pop("slices"))
    parts = {name: _part(**part) for name, part in values.pop("parts").items()}
    summary = LogSummary(**values, files=files, parts=parts, slices=slices, rejected=rejected)
    found = ColumnFiles(at, sizes, summary)
    return found if all(_size_of(found.path(name)) >= size for name, size in sizes.items()) else None


def _part(*, forms: Mapping[str, Any], **values: Any) -> FileSummary:
    return FileSummary(**values, forms={name: CellForms(**form) for name, form in forms.items()})


def build_version(names: Sequence[str], parts: Sequence[LogPart], place: Path, encoder: ColumnEncoder) -> ColumnFiles:
    """Builds the version of all parts, reading only the parts that no earlier version has.

    Args:
        names: of the versions of the first part, the first two, and so on to all of them.
        place: the folder of all versions.
        encoder: an encoder that has not seen a row.

    Raises:
        OSError: it cannot be written.
    """
    folder = place / names[-1]
    for count in range(len(parts) - 1, 0, -1):
        if (before := read_version(place / names[count - 1])) is not None:
            with lock(before.folder):
                if _take_tip(before, names[count - 1], names[-1]):
                    return _append(before, parts[count:], folder, encoder)
            break
    folder.mkdir(parents=True, exist_ok=True)
    return _append(ColumnFiles(folder, {}, LogSummary()), parts, folder, encoder)


def _take_tip(version: ColumnFiles, name: str, following: str) -> bool:
    """Claims the end of the column files for ``following``; False if another version was appended after ``name``."""
    tip = version.folder / TIP
    try:
        last = json.loads(tip.read_text(encoding="utf-8"))
    except FileNotFoundError:
        last = {"version": version.folder.name}
    unfinished = last.get("after") == name and read_version(version.folder.parent / last["version"]) is None
    if last["version"] != name and not unfinished:
        return False
    write_json(tip, {"version": following, "after": name})
    return True


def _append(before: ColumnFiles, parts: Sequence[LogPart], folder: Path, encoder: ColumnEncoder) -> ColumnFiles:
    """Appends parts to those of a version, and writes the manifest of the new version."""
    summary, sizes = before.summary, dict(before.sizes)
    encoder.resume(summary.files, summary.slices)
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for batch in _batches(parts):
            encoded = encoder.encode(batch)
            summary.rows_in, summary.rows = summary.rows_in + len(batch), summary.rows + encoded.rows
            summary.count(batch, encoded.rejected, encoded.unknown, encoder.features)
            _write(encoded.arrays, before, sizes, files, stack)
        if not sizes:  # the log has no rows
            _write(encoder.encode([]).arrays, before, sizes, files, stack)
    values = {
        "columns": before.folder.name,
        "sizes": sizes,
        "rows_in": summary.rows_in,
        "rows": summary.rows,
        "files": list(encoder.files),
        "parts": {name: asdict(part) for name, part in summary.parts.items()},
        "slices": [list(codes) for codes in encoder.slices],
        "reasons": dict(sorted(summary.reasons.items(), key=lambda item: -item[1])),
        "rejected": [[row.source, row.row, row.reason] for row in summary.rejected],
        "unknown": summary.unknown,
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / COMPLETE, values)
    found = read_version(folder)
    assert found is not None
    return found


def _write(
    arrays: Mapping[str, np.ndarray],
    before: ColumnFiles,
    sizes: dict[str, int],
    files: dict[str, Any],
    stack: ExitStack,
) -> None:
    for name, array in arrays.items():
        if name not in files:
            file = stack.enter_context(before.path(name).open("ab"))
            file.truncate(before.sizes.get(name, 0))  # bytes that a killed process left behind
            files[name] = file
        files[name].write(np.ascontiguousarray(array).data)
        sizes[name] = sizes.get(name, 0) + array.nbytes


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1


def _batches(parts: Sequence[LogPart]) -> Iterator[list[Raw | Rejected]]:
    rows = (row for part in parts for row in part.rows())
    while batch := list(islice(rows, BATCH)):
        yield batch
