"""A run is a folder.

job.yaml            the job as it was resolved on the machine
environment.json    versions, device, git revision, data fingerprint
plan.json           memory and time of a step as predicted, and as measured
metrics.jsonl       one object a step
repeated.jsonl      the metrics of repeated steps: after a fault, or because training went back
events.jsonl        events: started, resumed, evaluated, saved, stopped ... ; appended, never rewritten
checkpoints/        step-00000060/ ...
logs/               the output of each process, and its failure
tensorboard/        if train.tensorboard is set
wandb/, mlflow/     if train.wandb or train.mlflow is set
lineage.json        of a stage: its job as written and the content of its inputs; see `stoker.train.records.lineage`
chaos/              faults to be injected; see `stoker chaos`
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from stoker.errors import CodeFailed, Problem, UserError
from stoker.files import free_name, no_link, open_regular, read_file, replace_file
from stoker.job.run_records import LOCK
from stoker.json_values import finite_number, whole_number
from stoker.runs.json_lines import append_line, disk_errors, line_of, read_lines
from stoker.runs.line_batches import LONGEST
from stoker.runs.output_folder import output_problem

# Events that define the state of training; others, such as `exported`, can follow them.
STARTS = ("started", "resumed")
ENDS = (*STARTS, "done", "stopped", "failed", "interrupted")
PATIENCE = 0.5  # timeout in seconds; listing the runs holds the lock for an instant


@dataclass
class RunFolder:
    """The paths of a run, and how they are written."""

    path: Path

    def __post_init__(self) -> None:
        self.job = self.path / "job.yaml"
        self.environment = self.path / "environment.json"
        self.plan = self.path / "plan.json"
        self.metrics = self.path / "metrics.jsonl"
        self.repeated = self.path / "repeated.jsonl"
        self.events = self.path / "events.jsonl"
        self.chaos = self.path / "chaos"
        self.lineage = self.path / "lineage.json"
        self.checkpoints = self.path / "checkpoints"

    @contextmanager
    def take(self) -> Iterator[bool]:
        """Locks the folder against other trainings; yields whether it was created.

        Raises:
            UserError: another process is training in it, or the folder cannot be created.
        """
        if problem := output_problem(self.path):
            raise UserError(Problem(*problem, key="output"))
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                self.path.mkdir()
                is_new = True
            except FileExistsError:
                is_new = False
            lock = FileLock(self.path / LOCK, timeout=PATIENCE)
            lock.acquire()
        except Timeout as error:
            raise UserError(
                f"another process is training in {self.path}; wait for it, or give another `output`"
            ) from error
        except OSError as error:
            raise UserError(
                f"output: {self.path} cannot be written ({error.strerror}); give another `output`"
            ) from error
        try:
            yield is_new
        finally:
            lock.release()

    def is_taken(self) -> bool:
        """Returns whether a process is training in it."""
        path = self.path / LOCK
        if not path.exists():
            return False
        try:
            with FileLock(path, blocking=False):
                return False
        except Timeout:
            return True
        except OSError:  # another user's file, which can only be read
            return _is_locked(path)

    def event(self, event: str, **values: Any) -> None:
        """Appends one event with its time (seconds since 1970)."""
        append_line(self.events, {"time": round(time.time(), 3), "event": event, **values})

    def read_events(self) -> list[dict[str, Any]]:
        """Returns all events, oldest first."""
        return list(read_lines(self.events))

    def read_metrics(self) -> list[dict[str, Any]]:
        """Returns all metrics, one a step; lines without the number of a step are of no use."""
        return [line for line in read_lines(self.metrics) if finite_number(line.get("step")) is not None]

    def forget_after(self, step: int) -> int:
        """Moves the metrics of steps that will be repeated to ``repeated.jsonl``; returns how many there were."""
        lines = self.read_metrics()
        if again := "".join(line_of(line) for line in lines if line["step"] > step):
            with disk_errors(self.repeated), open(self.repeated, "a", encoding="utf-8", opener=no_link) as file:
                file.write(again)
        kept = "".join(line_of(line) for line in lines if line["step"] <= step)
        if self.metrics.is_file() and kept.encode() != read_file(self.metrics):  # also where half a line is left
            self.write_text(self.metrics, kept)
        return sum(line["step"] > step for line in lines)

    def write_job(self, text: str) -> None:
        """Writes ``job.yaml``."""
        self.write_text(self.job, text)

    def write_json(self, path: Path, values: dict[str, Any]) -> None:
        """Writes a JSON file of the folder, such as ``environment.json``."""
        self.write_text(path, json.dumps(values, indent=2, ensure_ascii=False) + "\n")

    def write_text(self, path: Path, text: str) -> None:
        """Writes a file of the folder, atomically."""
        with disk_errors(path):
            replace_file(path, text)

    def identity(self) -> str | None:
        """Returns a digest of the first event, which differs for another run in the same folder; None without one."""
        try:
            with open(self.events, "rb", opener=open_regular) as file:
                return hashlib.sha256(file.readline(LONGEST)).hexdigest()
        except FileNotFoundError:
            return None

    def updated(self) -> float | None:
        """Returns when its events or metrics were last written, in seconds since 1970; None if there are none."""
        times = []
        for path in (self.events, self.metrics):
            with suppress(OSError):  # also if the run is just being removed
                times.append(path.stat().st_mtime)
        return max(times, default=None)

    def has_begun(self) -> bool:
        """Returns whether training has begun in it."""
        return any(event.get("event") in STARTS for event in self.read_events())

    def saved_steps(self) -> set[int]:
        """Returns the steps that the events list as saved on disk, except those after which the run went back."""
        saved: set[int] = set()
        for event in self.read_events():
            name = event.get("event")
            step = whole_number(event.get("to" if name == "rolled_back" else "step"))
            if name == "saved" and event.get("where") == "disk":
                saved.add(step)
            elif name in (*STARTS, "rolled_back"):
                saved = {other for other in saved if other <= step}
        return saved

    def is_done(self) -> bool:
        """Returns whether training has reached its end, and has not restarted since."""
        return self._last_end().get("event") == "done"

    def ended_in_user_code(self) -> bool:
        """Returns whether a failure of the user's code ended training, and it has not restarted since."""
        end = self._last_end()
        return end.get("event") == "failed" and end.get("cause") == CodeFailed.__name__

    def _last_end(self) -> dict[str, Any]:
        """Returns the last event that defines the state of training; empty without one."""
        return next((e for e in reversed(self.read_events()) if e.get("event") in ENDS), {})


def _is_locked(path: Path) -> bool:
    """Returns whether a process has the lock of a file, which need not be writable."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def put_aside(path: Path, first: Callable[[], None] = lambda: None) -> Path:
    """Renames a run's folder to the first free ``NAME.1``, ``NAME.2`` ...; returns the new path.

    Args:
        first: called before, while the folder is locked.

    Raises:
        UserError: a process is training in it, or it is not a run.
    """
    with RunFolder(path).take():
        first()
        return path.rename(path.with_name(free_name(path.name, lambda name: path.with_name(name).exists())))
