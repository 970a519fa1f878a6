"""The inputs of a job: sources of data by key, and the files of scorers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from stoker.job.imported_modules import module_of, python_files
from stoker.job.schema import Job
from stoker.job.task_spec import task_of

SOURCES = ("data", "evaluate.data")  # the keys of lists of sources
SCHEMA = "json_schema:"  # a scorer whose argument is a file

S = TypeVar("S")


def by_source_key(data: Sequence[S], evaluation: Sequence[S]) -> dict[str, S]:
    """Returns what belongs to each source of a job, by the key of the source, such as ``evaluate.data[0]``."""
    lists = zip(SOURCES, (data, evaluation), strict=True)
    return {f"{key}[{index}]": each for key, sources in lists for index, each in enumerate(sources)}


def schema_file(scorer: str) -> str:
    """Returns the file of a scorer ``json_schema:FILE``; empty for another scorer."""
    return scorer.removeprefix(SCHEMA) if scorer.startswith(SCHEMA) else ""


def scorer_files(job: Job, base: Path) -> Iterator[Path]:
    """Yields the files of the scorers of a job's task: schemas, and the Python modules of functions."""
    for named in task_of(job).names(job):
        if named.kind == "scorer":
            if named.value.startswith("python:") and (module := module_of(named.value, base)) is not None:
                yield from python_files(module)
            elif file := schema_file(named.value):
                yield base / file
