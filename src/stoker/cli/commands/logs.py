"""Print the output of a run's processes. The output of a submitted run comes from all its nodes."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from stoker.cli.options.submitted_options import add_submitted, meant_record
from stoker.errors import Problem, UserError, did_you_mean


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``stoker logs``."""
    add_submitted(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="print new output until the run ends")
    parser.add_argument("--rank", metavar="N", type=int, help="print only the output of this rank")


def run(arguments: argparse.Namespace) -> int:
    """Prints the lines, each prefixed by its rank, unless one rank is requested."""
    count = 0
    for line in _lines(arguments):
        print(line, flush=arguments.follow)
        count += 1
    if not count and arguments.rank is not None:
        raise UserError(Problem(f"{arguments.run} has no log of rank {arguments.rank}", "ranks begin at 0"))
    return 0


def _lines(arguments: argparse.Namespace) -> Iterator[str]:
    from stoker.cluster.log_files import LogPlace, rank_label, read_logs
    from stoker.cluster.record import all_records, name_of
    from stoker.cluster.shell import LocalShell
    from stoker.cluster.submitted_run import submitted_run

    if arguments.on is not None or meant_record(arguments.run) is not None:
        found = submitted_run(arguments.run, arguments.on)
        yield from found.target.logs(found.record, rank=arguments.rank, follow=arguments.follow)
        return
    from shlex import quote

    from stoker.runs.find_run import find_run

    try:
        folder = find_run(arguments.run, Path.cwd())
    except UserError as error:
        exists = any((base / arguments.run).exists() for base in (Path.cwd(), Path.cwd() / "runs"))
        names = [record.name for record in all_records()]
        if exists or not names:
            raise
        hint = did_you_mean(name_of(arguments.run), names, 0.4) or f"submitted runs: {', '.join(names[:5])}"
        message = f"there is no run {arguments.run} here, and no submitted run of that name"
        raise UserError(Problem(message, hint)) from error
    place = LogPlace(LocalShell(), f"{quote(str(folder.path))}/logs/rank-*.log", rank_label)
    yield from read_logs([place], rank=arguments.rank, follow=arguments.follow, ended=lambda: not folder.is_taken())
