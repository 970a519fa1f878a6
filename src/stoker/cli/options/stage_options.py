"""The options that select stages of a job file."""

from __future__ import annotations

import argparse

from stoker.errors import Problem, UserError
from stoker.job.stages import has_stages


def add_stage_options(parser: argparse.ArgumentParser) -> None:
    """Adds ``--only NAME`` and ``--from NAME``."""
    parser.add_argument("--only", metavar="STAGE", help="select only this stage of a job with stages")
    parser.add_argument(
        "--from", metavar="STAGE", dest="begin", help="select this stage of a job with stages and those after it"
    )


def asks_for_stages(job: str, *, only: str | None, begin: str | None = None) -> bool:
    """Returns whether the job file has stages.

    Args:
        only, begin: values of ``--only`` and ``--from``.

    Raises:
        UserError: an option names a stage, and the file has none.
    """
    if has_stages(job):
        return True
    option = "--only" if only else "--from"
    if name := only or begin:
        raise UserError(Problem(f"{option} {name}: this job has no stages", f"leave {option} out", file=job))
    return False
