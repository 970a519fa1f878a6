"""The record of a submission: in the user's local state folder, and beside the run where the target stores it."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Self

from stoker.errors import Problem, UserError, did_you_mean
from stoker.files import read_file, replace_file

FILE = "submission.json"  # the record's file name beside the run
NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,50}[a-z0-9])?")  # fits a label of Kubernetes and a host name
LONGEST_NAME = 40  # characters of a name that is derived from a folder's


@dataclass(frozen=True)
class Record:
    """A submitted job.

    Attributes:
        name: its name in commands: `stoker logs NAME`.
        kind: of its target: ``ssh``, ``slurm`` ...
        target: the target's block, as JSON.
        on: the name or file of the target; empty for the job's own block.
        time: of submission, seconds since 1970.
        fingerprint: digest of all that was sent.
        nodes, devices: nodes, and processes on each.
        output: the run's folder, as its path on the nodes.
        base: the folder from which it was submitted, with the host before it.
        handle: the target's reference to it: a job's number, process groups, folders.
        stages: names of the stages of a job that has some.
    """

    name: str
    kind: str
    target: Mapping[str, Any]
    on: str
    time: float
    fingerprint: str
    nodes: int
    devices: int
    output: str
    base: str
    handle: Mapping[str, Any] = field(default_factory=dict)
    stages: Sequence[str] = ()

    @property
    def words(self) -> str:
        """The submission as its target names it, such as ``job 1234``; the run's folder if it has no such name."""
        return str(self.handle.get("words", self.output))

    @property
    def resumed_words(self) -> str:
        """The same after it was resumed, with the hosts on which it was."""
        return str(self.handle.get("started") or self.words)

    def value(self, key: str) -> Any:
        """Returns a value of the handle.

        Raises:
            UserError: the record, which may have been edited or come from another machine, has no such value.
        """
        if key not in self.handle:
            raise UserError(f"the record of {self.name} is damaged: it has no handle.{key}")
        return self.handle[key]

    def to_json(self) -> str:
        """Returns the record as the text of its file."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Parses the record of a file's text.

        Raises:
            ValueError: the text is not a record.
        """
        from pydantic import TypeAdapter  # loaded only where there are records

        return TypeAdapter(cls).validate_json(text, strict=True)


def records_folder() -> Path:
    """Returns the folder of this user's records: $XDG_STATE_HOME/stoker/submitted, by default below ~/.local/state."""
    home = os.environ.get("XDG_STATE_HOME")
    return (Path(home) if home else Path("~/.local/state").expanduser()) / "stoker" / "submitted"


def save_record(record: Record) -> None:
    """Writes a record, in the place of an earlier one of that name.

    Raises:
        OSError: it cannot be written.
    """
    records_folder().mkdir(parents=True, exist_ok=True, mode=0o700)
    replace_file(records_folder() / f"{record.name}.json", record.to_json())


def save_undoably(record: Record) -> Callable[[], None]:
    """Saves a record; returns a function that restores the earlier record of that name, or that there was none."""
    before = find_record(record.name)
    save_record(record)

    def undo() -> None:
        if before is not None:
            save_record(before)
        else:
            (records_folder() / f"{record.name}.json").unlink(missing_ok=True)

    return undo


def all_records() -> list[Record]:
    """This user's records, the newest first; files that are none are left out."""
    found = []
    for path in records_folder().glob("*.json") if records_folder().is_dir() else ():
        try:
            found.append(Record.from_json(read_file(path)))
        except (OSError, ValueError):
            continue
    return sorted(found, key=lambda record: -record.time)


def find_record(name: str) -> Record | None:
    """Returns the record of a name; None if it does not exist."""
    return next((record for record in all_records() if record.name == name), None)


def name_of(output: str) -> str:
    """Converts the name of a run's folder to a valid host name or label: ``runs/My job`` -> ``my-job``.

    A name with other letters ends with a digest of it: ``runs/naïve`` -> ``na-ve-f86fd8``.
    """
    last = _last(output)
    plain = re.sub(r"[^a-z0-9]+", "-", last.lower()).strip("-")[:LONGEST_NAME].rstrip("-")
    if last.isascii():
        return plain or "job"
    return f"{plain or 'job'}-{hashlib.sha256(last.encode()).hexdigest()[:6]}"


def record_among(records: Iterable[Record], run: str) -> Record | None:
    """Returns the record that a command names, by its name or by the run's folder; None if it does not exist.

    A path must agree with that of the record's run in the names of its folder and of the one above: the rest of the
    path may differ between this machine and the nodes.
    """
    by_name = {record.name: record for record in records}
    if "/" not in run.rstrip("/"):
        return by_name.get(_last(run)) or by_name.get(name_of(run))
    return next((record for record in by_name.values() if _is_folder_of(record, run)), None)


def _is_folder_of(record: Record, run: str) -> bool:
    given, known = (PurePosixPath(path.rpartition("://")[2]).parts[-2:] for path in (run, record.output))
    shorter = min(len(given), len(known))
    return given[-shorter:] == known[-shorter:]


def newest_of(records: Iterable[Record]) -> list[Record]:
    """Returns the newest record of each name."""
    return list({record.name: record for record in sorted(records, key=lambda record: record.time)}.values())


def record_named(run: str) -> Record:
    """Returns this user's record of a run, by its name or by the run's folder.

    Raises:
        UserError: it does not exist; the nearest is named.
    """
    records = all_records()
    record = record_among(records, run)
    if record is not None:
        return record
    name, names = _last(run), [record.name for record in records]
    known = f"submitted jobs: {', '.join(names[:5])}" if names else "`stoker submit JOB --on TARGET` makes one"
    raise UserError(Problem(f"no submitted job is named {name}", did_you_mean(name, names, 0.4) or known))


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]
