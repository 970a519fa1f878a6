"""Lists the runs below a folder with their state."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.errors import UserError
from stoker.json_values import finite_number, whole_number
from stoker.runs.goodput import Goodput, goodput
from stoker.runs.run_folder import ENDS, RunFolder


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """A summary of one run.

    Attributes:
        state: ``running``, ``done``, ``stopped`` (continues with the same command), ``failed``, ``interrupted``
            (killed), ``unreadable``.
        step, steps: reached, and in total; 0 if not known yet.
        loss, held_out_loss: the newest of each.
        age: seconds since the last write.
        goodput: the split of its time; None if it is not known yet.
        problem: why its files cannot be read; empty if they can.
    """

    path: str
    state: str
    task: str = ""
    model: str = ""
    step: int = 0
    steps: int = 0
    loss: float | None = None
    held_out_loss: float | None = None
    age: float
    goodput: Goodput | None = None
    problem: str = ""


def list_runs(root: Path) -> list[RunSummary]:
    """Returns every run in or below ``root``, the newest first, without hidden folders.

    Raises:
        UserError: ``root`` is a run itself, and its files cannot be read.
    """
    folders = {events.parent for events in root.glob("**/events.jsonl")} if root.is_dir() else set()
    shown = (folder for folder in folders if not any(part[0] == "." for part in folder.relative_to(root).parts))
    runs = (summarise(RunFolder(folder)) if folder == root else listed(RunFolder(folder)) for folder in shown)
    return sorted(runs, key=lambda run: run.age)


def listed(folder: RunFolder) -> RunSummary:
    """Returns the state of a run among others: one that cannot be read is ``unreadable``."""
    try:
        return summarise(folder)
    except UserError as error:
        return RunSummary(path=str(folder.path), state="unreadable", age=_age(folder), problem=str(error))


def summarise(folder: RunFolder) -> RunSummary:
    """Returns the state of a run from its events and metrics.

    Raises:
        UserError: they cannot be read.
    """
    events, metrics = folder.read_events(), folder.read_metrics()
    started: dict[str, Any] = next((e for e in reversed(events) if e.get("event") in ("started", "resumed")), {})
    held_out = [finite_number(e.get("loss")) for e in events if e.get("event") == "evaluated"]
    last = metrics[-1] if metrics else {}
    return RunSummary(
        path=str(folder.path),
        state=state_of(folder, events),
        task=str(started.get("task", "")),
        model=str(started.get("model", "")),
        step=whole_number(last.get("step")),
        steps=whole_number(started.get("steps")),
        loss=finite_number(last.get("loss")),
        held_out_loss=held_out[-1] if held_out else None,
        age=_age(folder),
        goodput=goodput(folder),
    )


def _age(folder: RunFolder) -> float:
    updated = folder.updated()
    return 0.0 if updated is None else time.time() - updated


def state_of(folder: RunFolder, events: list[dict[str, Any]]) -> str:
    """Returns ``running``, ``done``, ``stopped``, ``failed`` or ``interrupted``; see `RunSummary`."""
    if folder.is_taken():
        return "running"
    last = next((e["event"] for e in reversed(events) if e.get("event") in ENDS), "")
    return last if last in ("done", "stopped", "failed") else "interrupted"
