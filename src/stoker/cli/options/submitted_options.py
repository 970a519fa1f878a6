"""Arguments of the commands for submitted runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stoker.cluster.record import Record
    from stoker.runs.run_folder import RunFolder


def add_submitted(parser: argparse.ArgumentParser) -> None:
    """Adds ``RUN`` and ``--on``."""
    parser.add_argument("run", metavar="RUN", help="name of the submitted run, or its folder")
    parser.add_argument(
        "--on", metavar="TARGET", help="look the run up in this target's records, for runs submitted elsewhere"
    )


def meant_record(run: str) -> Record | None:
    """Returns the record of the submitted run that a command without ``--on`` means; None if it means a run here.

    A run here is meant if it is named by its path, if a process trains in its folder, or if there is no such record.
    A submission that trains in that very folder is the run here.
    """
    from stoker.cluster.record import all_records, record_among

    record, folder = record_among(all_records(), run), folder_here(run)
    if record is None or folder is None or _trains_in(record, folder.path):
        return record
    return None if "/" in run.rstrip("/") or folder.is_taken() else record


def folder_here(run: str) -> RunFolder | None:
    """Returns the folder of a run on this machine, by its path or by its name below ``runs/``."""
    from stoker.runs.run_folder import RunFolder

    places = (Path.cwd() / run, Path.cwd() / "runs" / run)
    return next((RunFolder(place) for place in places if (place / "events.jsonl").is_file()), None)


def _trains_in(record: Record, folder: Path) -> bool:
    from stoker.job.targets import KINDS
    from stoker.job.targets.shared_keys import TargetKeys

    if Path(record.output).is_absolute():  # this machine mounts the nodes' storage, if the folder is that of the run
        return Path(record.output).resolve() == folder.resolve()
    keys = KINDS[record.kind].model_validate(dict(record.target))
    assert isinstance(keys, TargetKeys)
    return keys.in_place and Path(record.base, record.output).resolve() == folder.resolve()
