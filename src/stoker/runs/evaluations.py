"""Evaluations that are stored in a run's folder.

evaluations/<time>-<kind>.json     the options, the data, and the figures; `VERSION` is its format
evaluations/<time>-<kind>.jsonl    the rows behind the figures: each answer with its scores

The first is written last: if it exists, both are complete. Reading them runs nothing.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, TypeAdapter

from stoker.errors import RunFailed
from stoker.files import read_file, replace_file
from stoker.json_values import finite
from stoker.runs.json_lines import disk_errors

VERSION = 1
FOLDER = "evaluations"
LARGEST = 1 << 22  # bytes of a summary that is read; the rows are elsewhere


@dataclass(frozen=True)
class Figure:
    """A number with its uncertainty.

    Attributes:
        of: the subject of the measurement: a template, a task; empty if there is only one.
        name: the scorer or metric.
        standard_error: None if it is not defined, as for one row.
        rows: number of rows that it is the mean of.
        low, high: its confidence interval, where one was computed.
    """

    of: str
    name: str
    value: Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
    standard_error: float | None = None
    rows: int = 0
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class KeptEvaluation:
    """A stored evaluation.

    Attributes:
        kind: ``answers``, ``prompts``, ``against``, ``tasks``.
        time: when it ended, seconds since 1970.
        model: the name of the run, folder or file.
        step: of the run's checkpoint; None without a run.
        data: path and content digest of the data, and the number of its rows.
        asked: the options that the figures depend on.
        details: counts and verdicts in addition to the figures.
    """

    kind: str
    time: float
    model: str
    step: int | None
    data: dict[str, Any]
    asked: dict[str, Any]
    figures: tuple[Figure, ...]
    details: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Returns the contents of the file; numbers that are not finite are null."""
        whole: dict[str, Any] = finite({"version": VERSION, **asdict(self)})
        return whole


_EVALUATION = TypeAdapter(KeptEvaluation)


def keep(folder: Path, evaluation: KeptEvaluation, rows: list[dict[str, Any]]) -> Path:
    """Writes an evaluation and its rows; returns the path of the summary.

    Args:
        folder: the run's folder, or another one, which is made.

    Raises:
        RunFailed: ``evaluations`` is a link, or no folder.
        DiskFailed: it cannot be written.
    """
    place = folder / FOLDER
    if place.is_symlink() or (place.exists() and not place.is_dir()):
        raise RunFailed(f"{place} is a link or no folder; remove it")
    with disk_errors(place):
        place.mkdir(parents=True, exist_ok=True)
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(evaluation.time))
    number, name = 1, f"{stamp}-{evaluation.kind}"
    with disk_errors(place):
        while (place / f"{name}.json").exists() or not _reserve(place / f"{name}.jsonl"):
            number += 1
            name = f"{stamp}-{evaluation.kind}-{number}"
    path = place / f"{name}.json"
    lines = (json.dumps(finite(row), ensure_ascii=False) + "\n" for row in rows)
    try:
        with disk_errors(path):
            replace_file(path.with_suffix(".jsonl"), "".join(lines))
            replace_file(path, json.dumps(evaluation.as_json(), indent=2, ensure_ascii=False) + "\n")
    except BaseException:  # also a signal
        for written in (path, path.with_suffix(".jsonl")):
            written.unlink(missing_ok=True)
        raise
    return path


def _reserve(path: Path) -> bool:
    """Creates a file; returns False if it exists, as of an evaluation that ends in the same second."""
    try:
        path.open("xb").close()
    except FileExistsError:
        return False
    return True


def read_evaluations(folder: Path) -> list[KeptEvaluation]:
    """Returns the evaluations of a run, oldest first; other files are ignored."""
    place = folder / FOLDER
    if place.is_symlink() or not place.is_dir():
        return []
    found = [_read(path) for path in sorted(place.glob("*.json"))]
    return sorted((each for each in found if each is not None), key=lambda each: each.time)


def _read(path: Path) -> KeptEvaluation | None:
    """Reads an evaluation's summary; returns None if the file has another format, is damaged, or is a link."""
    try:
        if path.is_symlink() or path.stat().st_size > LARGEST:
            return None
        content = json.loads(read_file(path))
        return _EVALUATION.validate_python(content) if content["version"] == VERSION else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
