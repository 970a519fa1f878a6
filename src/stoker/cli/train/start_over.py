"""Sets an earlier run and its checkpoints aside, so that a run starts over (``--fresh``, and changed stages)."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.errors import Problem, UserError
from stoker.job import load_job

if TYPE_CHECKING:
    from stoker.runs.run_folder import RunFolder


def is_restart(output: Path, environment: Mapping[str, str]) -> bool:
    """Returns whether a launcher gives the same command again after a failure, so that the run goes on.

    torchrun restarts one command. Slurm restarts a whole script, whose later commands may not have run before: a run
    has begun in the same Slurm job, or else its command is new.
    """
    from stoker.runs.run_folder import RunFolder

    if environment.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return True
    if environment.get("SLURM_RESTART_COUNT", "0") == "0":
        return False
    job = environment.get("SLURM_JOB_ID")
    return job is not None and any(event.get("slurm_job") == job for event in RunFolder(output).read_events())


def start_fresh(output: Path, to: str | None, base: Path) -> None:
    """Sets an earlier run aside for ``--fresh``, unless a launcher's restart resumes it; see `put_run_aside`."""
    if is_restart(output, os.environ):
        print(f"--fresh has no effect in a launcher's restart: {output} is resumed", file=sys.stderr)
    else:
        put_run_aside(output, to, base)


def put_run_aside(output: Path, to: str | None, base: Path) -> None:
    """Renames an earlier run, and moves its checkpoints into a folder below ``to``; prints the new places.

    Args:
        to: the job's ``checkpoint.to``.

    Raises:
        UserError: a process is training in the run's folder, or the checkpoints are those of another run.
    """
    from stoker.checkpoint.dcp_store import place_of
    from stoker.runs.kept_copies import rename_with_memory
    from stoker.runs.output_folder import is_run
    from stoker.runs.run_folder import RunFolder, put_aside

    folder = RunFolder(output)
    place = place_of(to, folder, base)
    moved: list[str] = []

    def move() -> None:
        if to is not None and not (isinstance(place, Path) and place.is_relative_to(output)):
            moved.extend(_move_checkpoints(folder, to, place, base))

    if is_run(output):
        aside, step = rename_with_memory(output, lambda: put_aside(output, first=move))
        print(f"the earlier run is now in {aside}", file=sys.stderr)
        if step is not None:
            print(f"its step {step} stays in this machine's memory until {aside} is removed", file=sys.stderr)
    else:  # its checkpoints may be left
        move()
    for new in moved:
        print(f"its checkpoints are now in {new}", file=sys.stderr)


def _move_checkpoints(folder: RunFolder, to: str, place: Path | str, base: Path) -> list[str]:
    """Moves the checkpoints of a run, and records the new place in its job; returns that place, if there are any."""
    from stoker.checkpoint.dcp_store import place_of
    from stoker.checkpoint.owner import check_owner
    from stoker.checkpoint.storage import storage_of
    from stoker.cluster.named_files import with_paths
    from stoker.job.document.job_to_yaml import dump_job

    storage = storage_of(place)
    owner = check_owner(storage, folder)
    if not storage.steps():
        return []
    loaded = None
    with suppress(UserError):  # there is no such job, or another version wrote it: the checkpoints keep their names
        loaded = load_job(folder.job)
        if place_of(loaded.job.checkpoint.to, folder, base) != place:
            loaded = None
    if loaded is None and owner is None:  # an earlier version wrote them
        message = f"{place} has checkpoints, and nothing tells whether they are those of {folder.path}"
        raise UserError(Problem(message, "give another place, or move them yourself", key="checkpoint.to"))
    new = f"{to.rstrip('/')}/{storage.put_all_aside(folder.path.name)}"
    if loaded is not None:
        folder.write_job(dump_job(with_paths(loaded, {"checkpoint.to": new}).job))
    return [new]
