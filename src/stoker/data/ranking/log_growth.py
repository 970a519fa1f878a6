"""A growing log: the fingerprints of its parts, and their changes that keep a run from continuing."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import numpy as np

from stoker.data.ranking.features import Features
from stoker.data.ranking.log_rows import ordered_files
from stoker.data.sources import Source
from stoker.errors import Problem

if TYPE_CHECKING:
    from stoker.data.ranking.click_log import ClickLog

# Keys beside the files' fingerprints, for a log that may grow:
FITTED, IN_ORDER = "what the first period says of the features", "the order of the files in time"
_FILE_KEY = re.compile(r"(.*), file (\d+) \((.*)\)", re.DOTALL)  # as `key_of_file` writes it


def fingerprints_of(file_of_row: np.ndarray, sources: Sequence[tuple[Source, str]], fitted: Features) -> dict[str, str]:
    """Fingerprints the features fitted to a log's first period, and all of its files, if none is later than the next.

    Args:
        file_of_row: number of each row's file, in the order of time.
    """
    values = {name: value for name, value in fitted.as_json().items() if name != "time_unit"}  # older runs lack it
    known = hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=16).hexdigest()
    in_order = bool((np.diff(file_of_row) >= 0).all())
    found = {FITTED: known, IN_ORDER: "none is later than the next one" if in_order else "mixed"}
    for source, _ in sources:
        files = enumerate(ordered_files(source), 1)
        found |= {key_of_file(source, number, name): content for number, (_, name, content) in files}
    if not in_order:
        found |= {source.name: source.fingerprint() for source, _ in sources}
    return found


def key_of_file(source: Source, number: int, name: str) -> str:
    """Returns the key of a file's fingerprint."""
    return f"{source.name}, file {number} ({name})"


def growth_problem(recorded: Mapping[str, str], log: ClickLog) -> Problem | None:
    """Returns the first problem of a log that a run with the recorded fingerprints was trained on; None without one."""
    return next(_problems(recorded, log), None)


def absent_columns(log: ClickLog) -> dict[str, list[str]]:
    """Returns the labels, features and the group that no row of a file has a field of, by the file's fingerprint."""
    parts = {path: part for store in log.stores for path, part in store.summary.parts.items()}
    found = {
        key: sorted(log.features.read.difference(parts[path].columns))
        for key, path in log.paths.items()
        if path in parts
    }
    return {key: names for key, names in found.items() if names}


def _problems(recorded: Mapping[str, str], log: ClickLog) -> Iterator[Problem]:
    before, now = _files_of(recorded), _files_of(log.fingerprints)
    for (source, name), (_, content) in before.items():
        if (source, name) not in now:
            yield Problem(f"{name} of {source} was removed, which the run has trained on", "put it back")
        elif now[source, name][1] != content:
            message = f"{name} of {source} has changed since the run trained on it"
            yield Problem(message, "restore it, and write further rows to a new file")
    new = {file: number for file, (number, _) in now.items() if file not in before}
    for (source, name), number in new.items():
        if before and number <= sum(other == source for other, _ in before):
            message = f"{name} of {source} comes before files that the run has trained on"
            yield Problem(message, "rename it so that it comes last, or move it out of the folder")
    if recorded.get(IN_ORDER, log.fingerprints.get(IN_ORDER)) != log.fingerprints.get(IN_ORDER):
        yield _late_rows(log)
    if before:
        for key, names in absent_columns(log).items():
            if key in log.fingerprints and key not in recorded:
                message = f"the rows of {log.paths[key]} have no column {names[0]!r}, which the model is trained on"
                yield Problem(message, "add it; leave it empty if there is no value")


def _late_rows(log: ClickLog) -> Problem:
    """Returns the problem of the first file with rows earlier than those of the files before it."""
    store = log.training.store
    times, places = store.array("time"), store.array("place")
    ends = np.full(len(store.summary.files), -np.inf)
    np.maximum.at(ends, places[:, 0], times)
    before = np.concatenate([[-np.inf], ends[:-1]])  # of the first late file: the ends before it increase
    late = np.flatnonzero(times < before[places[:, 0]])
    file, row = places[late[0]]
    count, name, unit = int((places[late, 0] == file).sum()), store.summary.files[file], log.features.time_unit
    first, end = _shown(times[late[0]], unit), _shown(before[file], unit)
    message = (
        f"{name}: rows are earlier than the files before it, which end at {end}: {count:,}, as row {row} at {first}"
    )
    return Problem(message, "move it out of the folder")


def _shown(time: float, unit: float | None) -> str:
    return f"{time:g}" if unit is None else f"{datetime.fromtimestamp(time * unit, UTC):%Y-%m-%d %H:%M:%S}"


def _files_of(prints: Mapping[str, str]) -> dict[tuple[str, str], tuple[int, str]]:
    """Returns number and content of each file among fingerprints, by source and name."""
    matches = ((_FILE_KEY.fullmatch(key), content) for key, content in prints.items())
    return {(found[1], found[3]): (int(found[2]), content) for found, content in matches if found}
