"""Checks whether a folder is a run or can become one: no other folder is written to, moved or removed."""

from __future__ import annotations

import os
from pathlib import Path

from stoker.files import irregular, unwritable
from stoker.job.run_records import LOCK, RECORDS

FILES = (*RECORDS, "job.yaml")
WRITTEN = (*FILES, "checkpoints", "logs", "tensorboard", "wandb", "mlflow", "chaos")


def is_run(folder: Path) -> bool:
    """Returns whether a run has begun in a folder: it has a job and events, or a lock and only files of a run."""
    if not folder.is_dir():
        return False
    if (folder / "job.yaml").is_file() and (folder / "events.jsonl").is_file():
        return True
    names = {path.name for path in folder.iterdir()}
    return LOCK in names and all(name in WRITTEN or name.startswith(".") for name in names)


def output_problem(folder: Path) -> tuple[str, str] | None:
    """Returns why a job's ``output`` cannot be a run's folder, with a suggestion; None if it can."""
    what = unwritable(folder) or _holds(folder)
    return (f"output: {folder} {what}", "give a folder of its own, such as runs/mine") if what else None


def _holds(folder: Path) -> str:
    """Describes the content of a folder that prevents a run; empty if there is none."""
    if not os.path.lexists(folder):
        return ""
    if is_run(folder):
        links = [name for name in WRITTEN if (folder / name).is_symlink()]
        if links:
            return f"holds a link, {links[0]}, where a run writes"
        return next(
            (f"holds {kind}, {name}, where a run writes" for name in FILES if (kind := irregular(folder / name))), ""
        )
    other = next(folder.iterdir(), None)
    return f"is a folder with other files ({other.name}), not a run" if other else ""
