"""End a submitted run on every node, after it has saved."""

from __future__ import annotations

import argparse

from stoker.cli.submitted_options import add_submitted, name_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``stoker stop``."""
    add_submitted(parser)


def run(arguments: argparse.Namespace) -> int:
    """Stop; returns 0 once no process is left."""
    from stoker.cluster.submitted_run import submitted_run

    found = submitted_run(name_of(arguments.run), arguments.on)
    before = found.target.status(found.record)
    if before.state not in ("waiting", "running"):
        print(f"{found.record.name} is {before.state} already" + (f": {before.why}" if before.why else ""))
        return 0
    found.target.stop(found.record)
    after = found.target.status(found.record)
    print(f"{found.record.name}: {after.state}" + (f" ({after.why})" if after.why else ""))
    print(f"to go on: stoker resume {found.record.name}")
    return 0
