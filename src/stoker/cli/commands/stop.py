"""Save a checkpoint and stop a run: a submitted run on every node, or a run on this machine."""

from __future__ import annotations

import argparse
import shlex
import time
from pathlib import Path

from stoker.cli.options.submitted_options import add_submitted, folder_here, meant_record
from stoker.errors import RunFailed

POLL = 0.1  # seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``stoker stop``."""
    add_submitted(parser)


def run(arguments: argparse.Namespace) -> int:
    """Stops the run; returns 0 once no process is left."""
    from stoker.cluster.submitted_run import submitted_run

    here = folder_here(arguments.run) if arguments.on is None else None
    if here is not None and meant_record(arguments.run) is None:
        return _stop_here(arguments.run)
    found = submitted_run(arguments.run, arguments.on)
    before = found.target.status(found.record)
    if not before.is_active and (before.state == "done" or not before.unreached):
        if here is not None and here.is_taken():  # by `stoker train`, in the folder of the ended submission
            return _stop_here(arguments.run)
        print(f"{found.record.name} is already {before.state}" + (f": {before.why}" if before.why else ""))
        return 0
    found.target.stop(found.record)
    after = found.target.status(found.record)
    print(f"{found.record.name}: {after.state}" + (f" ({after.why})" if after.why else ""))
    print(f"to continue: stoker resume {found.record.name}")
    return 0


def _stop_here(name: str) -> int:
    """Asks the process that trains in a run's folder to end, and waits for it."""
    from stoker.runs.find_run import find_run
    from stoker.runs.listing import summarise
    from stoker.runs.lock_holder import ask_to_stop, holder_of

    folder = find_run(name, Path.cwd())
    process = holder_of(folder)
    if process is None or not ask_to_stop(process):
        if folder.is_taken():
            raise RunFailed(f"the process that trains in {name} is not on this machine, or another user's")
        print(f"{name} is already {summarise(folder).state}")
        return 0
    while folder.is_taken():
        time.sleep(POLL)
    after = summarise(folder)
    print(f"{name}: {after.state} after step {after.step}")
    again = f"to continue: stoker train {shlex.quote(str(folder.job))}"
    print(again if after.state != "done" else "the run was already complete")
    return 0
