"""``stoker train --follow``: training continues as new files arrive in the log."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import sleep, time
from typing import TYPE_CHECKING

from stoker.errors import Problem, UserError
from stoker.job.block import LONGEST

if TYPE_CHECKING:
    from stoker.job import LoadedJob

SETTLED = 60.0  # seconds without a change after which a file without a final newline is complete


def check_follows(loaded: LoadedJob, seconds: float, *, alone: bool) -> None:
    """Checks that a job can be trained with ``--follow``.

    Args:
        alone: whether no launcher started this process.

    Raises:
        UserError: its data may not grow.
    """
    from stoker.job.task_spec import task_of

    if not 0 < seconds <= LONGEST:
        raise UserError(Problem(f"--follow {seconds:g}: not a valid number of seconds", "write `--follow 60`"))
    if not task_of(loaded.job).grows(loaded.job):
        message = "--follow needs a growing log that is trained on in time order"
        raise UserError(Problem(message, "write `task: ranking` with `ranking: {progressive: true}`"))
    if loaded.job.steps is not None:
        raise UserError(
            loaded.problem(
                "steps", "--follow trains on all rows that arrive, but `steps` limits the run", "write `epochs: 1`"
            )
        )
    if not alone:
        raise UserError(Problem("--follow does not work in the processes of a launcher", "start `stoker train` itself"))


def contents_of(loaded: LoadedJob, base: Path) -> list[dict[str, str]]:
    """Returns values that change with each file's content, by source and name."""
    from stoker.data.sources import open_source

    return [open_source(block, base).contents() for block in loaded.job.data]


def wait_for_more(
    loaded: LoadedJob,
    base: Path,
    known: list[dict[str, str]],
    seconds: float,
    pause: Callable[[float], None] = sleep,
) -> None:
    """Returns once the files differ from the known ones, have not changed between two polls, and are complete."""
    print(f"waiting for more rows, checking every {seconds:g} s; Ctrl-C stops", file=sys.stderr, flush=True)
    before = known
    while True:
        pause(seconds)
        try:
            found = contents_of(loaded, base)
        except UserError:  # a file is just being moved
            continue
        if found != known and found == before and not wait_until_complete(loaded, base, seconds, pause):
            return
        before = found


def wait_until_complete(loaded: LoadedJob, base: Path, seconds: float, pause: Callable[[float], None] = sleep) -> bool:
    """Waits until no text file is being written; returns whether it has waited."""
    reported: set[Path] = set()
    while (file := _incomplete_file(loaded, base)) is not None:
        if file not in reported:
            why = f"does not end with a newline, so it may be incomplete; it is used if it stays so for {SETTLED:g} s"
            print(f"{file} {why}", file=sys.stderr, flush=True)
            reported.add(file)
        pause(seconds)
    return bool(reported)


def _incomplete_file(loaded: LoadedJob, base: Path) -> Path | None:
    """Returns the first text file that has changed within `SETTLED` seconds and does not end with a newline."""
    from stoker.data.files.byte_streams import MAGIC
    from stoker.data.files.readers import PARQUET, data_suffix
    from stoker.data.sources import open_source

    for file in (file for block in loaded.job.data for file in open_source(block, base).files):
        if not isinstance(file, Path) or data_suffix(file) in PARQUET or file.suffix.lower() in MAGIC:
            continue
        with suppress(FileNotFoundError), file.open("rb") as stream:
            if time() - os.fstat(stream.fileno()).st_mtime < SETTLED:
                stream.seek(max(0, stream.seek(0, os.SEEK_END) - 1))
                if stream.read() != b"\n":
                    return file
    return None
